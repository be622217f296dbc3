"""Tensors of one value: the same as torch's, with memory only where something was written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.residency import resident_bytes

from npucompile.tools.agreement.poison import CHUNK_BYTES, filled

SIZES = [0, 1, 1000, CHUNK_BYTES // 4, 2 * CHUNK_BYTES // 4, 2 * CHUNK_BYTES // 4 + 1, 5 * CHUNK_BYTES // 4 - 3]


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (math.nan, torch.bfloat16), (-128.0, torch.int8), (0.0, torch.int32)]
)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_torchs(size: int, value: float, dtype: torch.dtype) -> None:
    tensor, want = filled((size, 1), value, dtype), torch.full((size, 1), value, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (want.shape, want.dtype, True)
    assert torch.equal(tensor.view(torch.uint8) if size else tensor, want.view(torch.uint8) if size else want)


@settings(max_examples=20, deadline=None)
@given(places=st.lists(st.integers(0, 3 * CHUNK_BYTES // 4 - 1), min_size=1, max_size=20))
def test_what_is_written_is_there_and_nowhere_else(places: list[int]) -> None:
    tensor, other = (filled((3 * CHUNK_BYTES // 4,), -1.0, torch.float32) for _ in range(2))
    want = torch.full(tensor.shape, -1.0)
    for i, place in enumerate(places):
        tensor[place] = want[place] = i
    assert torch.equal(tensor, want)
    assert bool((other == -1.0).all())
    assert bool((filled(tensor.shape, -1.0, torch.float32) == -1.0).all())


def test_only_what_is_written_takes_memory() -> None:
    filled((3 * CHUNK_BYTES,), math.nan, torch.bfloat16)
    tensor = filled((512, 2**20), math.nan, torch.bfloat16)
    tensor[::64, :1000] = 1.0
    assert resident_bytes([tensor]) < 20 * 2**20
    del tensor
