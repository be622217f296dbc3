"""lowering/ascend/operators/tensor_type.py: sizes of tensors, of int4 too, and their texts."""

from __future__ import annotations

import pytest
import torch

from npucompile.lowering.ascend.ge_file import GE_DTYPES
from npucompile.lowering.ascend.operators.tensor_type import ATTRIBUTE_DTYPES, BITS, DTYPES, NZ, TensorType


@pytest.mark.parametrize(
    ("tensor", "nbytes", "text"),
    [
        (TensorType("bf16", (16, 2)), 64, "bf16[16,2]"),
        (TensorType("i4", (3, 3)), 5, "i4[3,3]"),
        (TensorType("f32", ()), 4, "f32[]"),
        (TensorType("i8", (16, 32), NZ), 512, "i8[16,32] NZ"),
    ],
)
def test_a_type_knows_its_bytes(tensor: TensorType, nbytes: int, text: str) -> None:
    assert (tensor.nbytes, str(tensor)) == (nbytes, text)


def test_names_and_numbers_of_a_dtype_agree() -> None:
    for dtype, (name, number) in GE_DTYPES.items():
        assert DTYPES[name] == ATTRIBUTE_DTYPES[number]
        assert BITS[DTYPES[name]] == 8 * torch.empty((), dtype=dtype).element_size()
