"""lowering/device.py: devices by kind."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.lowering import device


def test_an_unknown_kind_names_the_legal_ones():
    with pytest.raises(SpecError, match="device is 'gpu'; legal are npu, emulated"):
        device.open_device("gpu")


def test_without_cann_there_is_no_npu_and_the_reason_says_so():
    assert "CANN" in (device.missing("npu") or "")
    with pytest.raises(LoweringError, match="CANN"):
        device.open_device("npu")


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_every_machine_has_a_cpu_and_an_emulated_device(kind):
    assert device.missing(kind) is None
