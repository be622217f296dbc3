"""lowering/device_error.py: the runtime's code is found in the texts that devices gave, and RuntimeError gets a name."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.device_error import OUT_OF_MEMORY, DeviceError, code_of, named


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("synchronize:build/CMakeFiles/torch_npu NPU function error: aclrtSynchronizeStream, error code is 507015", "507015"),
        ("EZ9999: Inner Error!\n rtStreamSynchronize execute failed, reason=[aicore exception], error code:507035", "507035"),
        ("call aclnnMm failed, detail:EZ1001: Tensor self not implemented", "EZ1001"),
        ("[ERROR] ret = 107030", "107030"),
        ("NPU out of memory. Tried to allocate 2.00 GiB", OUT_OF_MEMORY),
        ("Expected 4 tensors of 2048 elements at 0x7f2071234500", ""),
    ],
)
def test_the_code_of_a_text(text, code):
    assert code_of(text) == code


def test_what_the_runtime_raises_is_a_device_error_that_says_what_was_called():
    with pytest.raises(DeviceError, match=r"^a step on npu:0 failed: error code is 507015$") as caught, named("a step on npu:0"):
        raise RuntimeError("error code is 507015")
    assert (caught.value.code, isinstance(caught.value, LoweringError)) == ("507015", True)
    with pytest.raises(DeviceError, match="allocating on npu:0 failed: NPU out of memory"), named("allocating on npu:0"):
        raise torch.OutOfMemoryError("NPU out of memory")
    with pytest.raises(DeviceError, match=r"^a copy failed: no text$"), named("a copy"):
        raise RuntimeError("no text")
