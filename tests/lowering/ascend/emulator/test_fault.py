"""lowering/ascend/emulator/fault.py: a device fails at its step in its way; after one that raises it answers nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.lowering.ascend.emulator.device import EmulatedDevice
from npucompile.lowering.ascend.emulator.fault import ABORTS, HANGS, MEMORY, RAISES, Fault


@pytest.fixture
def launch():
    devices = []

    def steps(fault, count):
        devices.append(EmulatedDevice(0, fault))
        for _ in range(count):
            devices[-1]._state.count_step()
        return devices[-1]

    yield steps
    for device in devices:
        device.close()


def test_a_core_that_fails_takes_the_device_along(launch):
    device = launch(Fault(3, RAISES), 2)
    with pytest.raises(RuntimeError, match="error code is 507015"):
        device._state.count_step()
    with pytest.raises(LoweringError, match="the context of the device is lost"):
        device.record().wait(30)


def test_a_step_without_memory_leaves_the_device_as_it_was(launch):
    device = launch(Fault(1, MEMORY), 0)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        device._state.count_step()
    device._state.count_step()
    device.record().wait(30)


def test_a_call_that_hangs_never_returns(launch):
    thread = threading.Thread(target=launch, args=(Fault(1, HANGS), 1), daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()


def test_a_process_that_aborts_is_gone():
    package = "npucompile.lowering.ascend.emulator"
    code = f"from {package} import device, fault\ndevice.EmulatedDevice(0, fault.Fault(1, {ABORTS!r}))._state.count_step()"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120).returncode == -6


def test_another_kind_is_refused():
    with pytest.raises(SpecError, match="a fault is 'burns'; legal are raises, aborts, hangs, memory"):
        Fault(1, "burns")
