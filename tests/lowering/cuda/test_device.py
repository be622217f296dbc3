"""lowering/cuda/device.py: the protocol of a device over a GPU's events and memory, and what is said where there is none."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from support.fake_cuda import FakeCuda

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import device as protocol
from npucompile.lowering.cuda.device import CudaDevice
from npucompile.lowering.cuda.executable import CudaExecutable


@pytest.fixture
def device():
    device = CudaDevice(FakeCuda(), 0)
    yield device
    device.close()


@pytest.mark.parametrize(("kind", "asked"), [(CudaDevice, protocol.Device), (CudaExecutable, protocol.DeviceExecutable)])
def test_it_has_all_that_the_protocol_asks_for(kind, asked):
    for name, member in inspect.getmembers(asked):
        if not name.startswith("_") and inspect.isfunction(member):
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(member).parameters), name


def test_a_copy_is_seen_behind_its_event(device):
    host, result = device.pinned(16), device.pinned(16)
    host.copy_(torch.arange(16, dtype=torch.uint8))
    memory = device.zeros((16,), torch.uint8)
    memory.copy_(host, non_blocking=True)
    result.copy_(memory, non_blocking=True)
    device.record().wait(10)
    assert result.tolist() == list(range(16))
    assert (device.kind, device.name) == ("cuda", "cuda:0")
    # It names a directory.
    assert device.version == f"cuda-13.0-torch-{torch.__version__.replace('+', '-')}-Fake-GPU-90"


def test_an_event_that_does_not_come_ends_the_wait(device):
    gate = threading.Event()
    device._cuda.stream.launch("something long", gate.wait)
    event = device.record()
    with pytest.raises(LoweringError, match=r"cuda:0 has not finished within 0\.01 s"):
        event.wait(0.01)
    gate.set()
    event.wait(10)


def test_a_failure_is_told_by_every_later_event_on_any_thread(device):
    def fail():
        raise LoweringError("an illegal access")

    device._cuda.stream.launch("a step", fail)
    event, told = device.record(), []

    def wait():
        for timeout_s in (None, 10):
            with pytest.raises(LoweringError, match=r"a step on cuda:0 failed: .*an illegal access"):
                event.wait(timeout_s)
            told.append(timeout_s)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(20)
    assert told == [None, 10]


def test_what_a_gpu_has_not_is_refused(device, tmp_path):
    with pytest.raises(LoweringError, match="no format NZ"):
        device.to_nz(device.zeros((16, 16), torch.float32))
    device.load_packages(())
    with pytest.raises(LoweringError, match="vllm-ascend are for NPUs"):
        device.load_packages(("vllm-ascend",))
    assert device.communicators({}, 0) == {}
    with pytest.raises(LoweringError, match="groups tp need communicators"):
        device.communicators({"tp": object()}, 0)
    (tmp_path / "x.cuda").write_bytes(b"no graph")
    with pytest.raises(LoweringError, match="8 bytes are no graph for a GPU"):
        device.open(tmp_path / "x.cuda", 0, {})
    with pytest.raises(LoweringError, match=r"absent\.cuda"):
        device.open(tmp_path / "absent.cuda", 0, {})
