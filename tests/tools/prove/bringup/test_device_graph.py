"""tools/prove/bringup/device_graph.py: operands go to the device and come back, also larger ones, and what a step writes is read."""

from __future__ import annotations

import torch
from support import emulated

from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.tools.prove.bringup.device_graph import DeviceGraph, Host


def test_a_step_is_fed_run_and_read(tmp_path):
    hand = emulated.DeviceGraph()
    pool, rows, at = (hand.operand(i, meta) for i, meta in enumerate(("f32[4,2]", "f32[1,2]", "i32[1,1]")))
    written = hand.op("ScatterNdUpdate", {"var": pool, "indices": at, "updates": rows}, "write", ["f32[4,2]"])
    ge_file = hand.file(hand.op("Neg", {"x": written}, "neg", ["f32[4,2]"]), inputs=3, bound=(0,))
    graph = DeviceGraph(
        Host(open_device(0), tmp_path), ge_file, [torch.zeros(4, 2), torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.int32)]
    )
    graph.run()
    graph.feed(2, torch.tensor([[2]], dtype=torch.int32))
    (result,), seconds = graph.run()
    (left,) = graph.operands([0])
    assert left.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert torch.equal(result, -left)
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_the_page_locked_memory_grows_with_the_largest_transfer(tmp_path):
    host = Host(open_device(0), tmp_path)
    value = torch.arange(1 << 19, dtype=torch.int64)
    memory = host.device.empty(value.shape, value.dtype)
    host.write(memory, value)
    assert torch.equal(host.read(memory), value)
    assert host.read(host.device.empty((0, 3), torch.float32)).shape == (0, 3)
