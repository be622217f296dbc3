"""lowering/ascend/emulator/emulated_graph.py: each fault that a device would punish, put into a step, is refused and named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ge_calls as gc
from support.emulated import WAIT_S, DeviceGraph, on_device, on_devices, opened

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.device import EmulatedDevice, open_device
from npucompile.lowering.ascend.emulator.emulated_graph import FROZEN
from npucompile.lowering.ascend.ge_file import GeFile

X, TABLE, POOL, BUFFER, ROWS, GAIN = range(6)
SHAPES = ("f32[2,4]", "bf16[64,32]", "f32[5,4]", "f32[2,4]", "i32[2,1]", "f32[2,4]")
NAMES = ("inputs.x", "params.weight", "state.pool", "state.buffer", "inputs.rows", "params.gain")


def step() -> GeFile:
    """x * gain goes into the pool's rows and is the result, the old x + buffer into the buffer; a product takes the weight."""
    hand = DeviceGraph()
    x, weight, pool, buffer, rows, gain = (hand.operand(i, meta, NAMES[i]) for i, meta in enumerate(SHAPES))
    scaled = hand.op("Mul", {"x1": x, "x2": gain}, "scaled", ["f32[2,4]"])
    hand.op("ScatterNdUpdate", {"var": pool, "indices": rows, "updates": scaled}, "write", ["f32[5,4]"])
    size = hand.op("Shape", {"x": "write:0"}, "size", ["i32[2]"], dtype=3)
    total = hand.op("Add", {"x1": x, "x2": buffer}, "total", ["f32[2,4]"])
    axes = hand.op("Const", {}, "perm", value=gc.i64(1, 0))
    square = hand.op("MatMul", {"x1": hand.op("Transpose", {"x": weight, "perm": axes}, "moved"), "x2": weight}, "square", ["bf16[32,32]"])
    return hand.file(scaled, size, square, total, inputs=6, donations=[(3, BUFFER)], bound=[POOL])


def values() -> list[torch.Tensor]:
    weight = gc.draw(64, 32, dtype=torch.bfloat16)
    return [gc.draw(2, 4), weight, torch.zeros(5, 4), torch.ones(2, 4), gc.i32([3], [0]), torch.full((2, 4), 2.0)]


class Running:
    """The step, compiled on a device."""

    def __init__(self, device: EmulatedDevice, path: Path, change: Callable[[GeFile], GeFile] = lambda ge_file: ge_file) -> None:
        self.device = device
        self.operands = [on_device(device, value) for value in values()]
        self.executable = opened(device, change(step()), path)
        self.executable.compile(self.operands)

    def run(self, **changed: torch.Tensor) -> list[torch.Tensor]:
        operands = [changed.get(name.rpartition(".")[2], operand) for name, operand in zip(NAMES, self.operands, strict=True)]
        results: list[torch.Tensor] = self.executable(operands)
        return results


@pytest.fixture
def running(device: EmulatedDevice, tmp_path: Path) -> Running:
    return Running(device, tmp_path)


def test_a_step_is_queued_and_writes_its_state(running: Running) -> None:
    x, weight, _, _, _, _ = values()
    gate = threading.Event()
    running.device._state.stream.launch("hold", lambda: gate.wait(30))
    scaled, size, square = running.run()
    assert not running.device.record().passed()
    gate.set()
    running.device.record().wait(WAIT_S)
    assert torch.equal(scaled.cpu(), x * 2)
    assert size.cpu().tolist() == [5, 4]
    assert torch.equal(square.cpu(), (weight.t().float() @ weight.float()).bfloat16())
    pool = running.operands[POOL].cpu()
    assert torch.equal(pool[[3, 0]], x * 2)
    assert not pool[[1, 2, 4]].any()
    running.run()
    running.device.record().wait(WAIT_S)
    assert torch.equal(running.operands[BUFFER].cpu(), 1 + x + x)


def test_memory_that_may_move_may_move(running: Running) -> None:
    scaled = running.run(x=on_device(running.device, torch.ones(2, 4)))[0]
    running.device.record().wait(WAIT_S)
    assert scaled.cpu().tolist() == [[2.0] * 4] * 2


FED: dict[str, tuple[Callable[[Running], dict[str, torch.Tensor]], str]] = {
    "host tensor": (
        lambda r: {"x": torch.zeros(2, 4)},
        r"operand inputs.x of npucompile_\d+ is a tensor of the host \(cpu\); legal is emulated:0",
    ),
    "shape": (
        lambda r: {"x": on_device(r.device, torch.zeros(4, 2))},
        r"operand inputs.x of \S+ is f32\[4,2\]; the graph takes f32\[2,4\]",
    ),
    "dtype": (
        lambda r: {"rows": on_device(r.device, torch.zeros(2, 1, dtype=torch.int64))},
        r"inputs.rows .* is i64\[2,1\]; .* i32\[2,1\]",
    ),
    "strides": (lambda r: {"x": on_device(r.device, torch.zeros(2, 8))[:, :4]}, r"operand inputs.x of \S+ has strides \(8, 1\)"),
    "moved pool": (
        lambda r: {"pool": on_device(r.device, torch.zeros(5, 4))},
        "operand state.pool of .* moved from 0x.* to 0x.*; legal is the same",
    ),
    "moved buffer": (lambda r: {"buffer": on_device(r.device, torch.ones(2, 4))}, "operand state.buffer of .* moved"),
    "moved parameter": (lambda r: {"gain": on_device(r.device, torch.ones(2, 4))}, "operand params.gain of .* moved"),
    "format": (
        lambda r: {"weight": r.device.to_nz(r.operands[TABLE])},
        "operand params.weight of .* is in NZ; the graph was compiled for ND",
    ),
}


@pytest.mark.parametrize("fault", FED)
def test_operands_that_are_not_what_was_compiled_are_refused(running: Running, fault: str) -> None:
    change, message = FED[fault]
    changed = change(running)
    with pytest.raises(LoweringError, match=message):
        running.run(**changed)
    running.run()
    running.device.record().wait(WAIT_S)


def test_operands_of_another_device_are_refused(running: Running) -> None:
    other = open_device(1)
    with pytest.raises(LoweringError, match=r"operand inputs.x of \S+ is on emulated:1; legal is emulated:0"):
        running.run(x=on_device(other, torch.zeros(2, 4)))
    other.close()


def test_inputs_may_be_frozen(device: EmulatedDevice, tmp_path: Path) -> None:
    frozen = Running(device, tmp_path, lambda f: replace(f, options={**f.options, FROZEN: "1,0,0,0,0,0"}))
    with pytest.raises(LoweringError, match=r"operand inputs.x of .* moved"):
        frozen.run(x=on_device(device, torch.zeros(2, 4)))


def test_memory_that_nothing_wrote_is_not_read(running: Running) -> None:
    x = running.device.empty((2, 4), torch.float32)
    x[0].zero_()
    running.run(x=x)
    with pytest.raises(LoweringError, match=r"step 1 of .*operand inputs.x: nothing was written to its bytes 16 to 31; legal is all"):
        running.device.record().wait(WAIT_S)
    with pytest.raises(LoweringError, match="emulated:0 has failed before: step 1 of"):
        running.run()


def test_other_memory_for_a_donated_output_is_refused(running: Running) -> None:
    graph, fed = running.executable._graph, running.operands
    other = on_device(running.device, torch.zeros(2, 4))
    with pytest.raises(LoweringError, match=r"output 3 is given memory at 0x\w+; it was compiled for that of operand state.buffer, at 0x"):
        graph.run(fed, [None, None, None, other])
    with pytest.raises(LoweringError, match=r"memory is given for outputs \[0\]; the graph was compiled for outputs \[3\]"):
        graph.run(fed, [other, None, None, None])
    with pytest.raises(LoweringError, match=r"memory is given for outputs \[\]"):
        graph.run(fed)
    with pytest.raises(LoweringError, match="is fed 5 operands; it takes 6"):
        graph.run(fed[:-1], [None, None, None, fed[BUFFER]])
    with pytest.raises(LoweringError, match="is fed operand number 6; it takes 6"):
        graph.run([*fed, other], [None, None, None, fed[BUFFER]])
    with pytest.raises(LoweringError, match="stream is 7; legal is None"):
        graph.run(fed, [None, None, None, fed[BUFFER]], stream=7)


def test_an_operator_that_fails_ends_the_device_and_is_named(running: Running) -> None:
    running.run(rows=on_device(running.device, gc.i32([9], [0])))
    with pytest.raises(LoweringError, match=r"step 1 of npucompile_\d+: operator write \(ScatterNdUpdate\): \S+"):
        running.device.record().wait(WAIT_S)


def test_load_and_compile_come_first(device: EmulatedDevice, tmp_path: Path) -> None:
    graph = opened(device, step(), tmp_path)._graph
    with pytest.raises(LoweringError, match="is run before it is compiled; legal is load, compile, run"):
        graph.run([])
    with pytest.raises(LoweringError, match="is compiled before it is loaded"):
        graph.compile()
    with pytest.raises(LoweringError, match="create_pg is True"):
        graph.load({}, create_pg=True)
    graph.load(dict(step().options))
    with pytest.raises(LoweringError, match=r"inputs\.x has no storage format"):
        graph.compile()


def test_an_output_without_sizes_is_refused(device: EmulatedDevice, tmp_path: Path) -> None:
    hand = DeviceGraph()
    ge_file = hand.file(hand.op("Neg", {"x": hand.operand(0, "f32[2]")}, "neg", [""]))
    with pytest.raises(LoweringError, match="declares no sizes of its output neg:0"):
        opened(device, ge_file, tmp_path).compile([on_device(device, torch.zeros(2))])


def test_a_weight_in_nz_is_taken_where_its_readers_take_it(device: EmulatedDevice, tmp_path: Path) -> None:
    hand = DeviceGraph()
    x, weight = hand.operand(0, "bf16[4,64]", "inputs.x"), hand.operand(1, "bf16[64,32]", "params.weight")
    ge_file = hand.file(hand.op("MatMul", {"x1": x, "x2": weight}, "product", ["bf16[4,32]"]), inputs=2)
    executable = opened(device, ge_file, tmp_path)
    assert executable.nz_operands == {1}
    host = [gc.draw(4, 64, dtype=torch.bfloat16), gc.draw(64, 32, dtype=torch.bfloat16)]
    operands = [on_device(device, value) for value in host]
    tiled = [operands[0], device.to_nz(operands[1])]
    executable.compile(tiled)
    (result,) = executable(tiled)
    device.record().wait(WAIT_S)
    assert torch.equal(result.cpu(), (host[0].float() @ host[1].float()).bfloat16())
    running = opened(device, step(), tmp_path)
    moved = [on_device(device, value) for value in values()]
    moved[TABLE] = device.to_nz(moved[TABLE])
    with pytest.raises(LoweringError, match=r"moved \(Transpose\) takes params.weight:0, which is in NZ, as x"):
        running.compile(moved)


# --- ranks ---


def summed(path: Path, ranks: int, wait_s: float = WAIT_S) -> list[Any]:
    """Runs a sum over a group of two on so many of its ranks; returns the result or the error of each."""
    hand = DeviceGraph()
    hand.op("HcomAllReduce", {"x": hand.operand(0, "f32[3]")}, "talk", ["f32[3]"], group="tp", reduction="sum")
    ge_file, done = hand.file("talk:0", patches=[("talk", "group", "group")]), threading.Event()

    def work(device: EmulatedDevice, rank: int, communicators: Any) -> Any:
        if rank >= ranks:
            return done.wait(WAIT_S)
        try:
            executable, operands = opened(device, ge_file, path, rank, communicators), [on_device(device, torch.full((3,), rank + 1.0))]
            executable.compile(operands)
            (result,) = executable(operands)
            device.record().wait(wait_s)
            return result.cpu()
        finally:
            done.set()

    return on_devices(Mesh.parse("tp=2"), work, 2 if ranks < 2 else WAIT_S)


def test_ranks_of_a_group_run_an_operator_together(tmp_path: Path) -> None:
    assert [result.tolist() for result in summed(tmp_path, 2)] == [[3.0] * 3] * 2


def test_a_wait_for_a_rank_that_does_not_come_says_so(tmp_path: Path) -> None:
    error, _ = summed(tmp_path, 1, wait_s=0.5)
    assert isinstance(error, LoweringError)
    assert "it runs step 1 of npucompile_" in str(error)
    assert "operator talk (HcomAllReduce)" in str(error)
    assert "on communicator 'emulated/tp/0' waits for ranks [1] of [0, 1]" in str(error)
