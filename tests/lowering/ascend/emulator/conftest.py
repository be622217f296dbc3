"""A device for tests of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npucompile.lowering.ascend.emulator.device import EmulatedDevice, open_device


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = open_device(0)
    yield device
    device.close()
