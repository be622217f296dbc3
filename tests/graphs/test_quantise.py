"""graphs/quantise.py: rounding to int8 and int4 equals that of the checkpoints' tools, and packing is lossless."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import CheckpointError
from npucompile.graphs.quantise import (
    assist_w4,
    bits_scale,
    pack_rows,
    pack_w4,
    quantise_rows,
    quantise_w4,
    quantise_w8,
    scale_bits,
    unpack_rows,
    unpack_w4,
)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_rows_round_half_to_even_by_their_own_scale() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [-254.0, 3.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rows, scale = quantise_rows(x)
    assert rows.dtype == torch.int8
    assert rows.tolist() == [[127, 0, 2, -2], [-127, 2, 2, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 2.0, 0.0]


def test_w8_has_one_scale_an_output_channel() -> None:
    weight = draw(3, 5, 4)
    values, scale = quantise_w8(weight)
    assert (values.shape, values.dtype, scale.shape, scale.dtype) == (weight.shape, torch.int8, (3, 4), torch.float32)
    torch.testing.assert_close(scale, weight.abs().amax(1) / 127)
    assert ((values * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()


def test_w4_has_one_scale_an_output_channel() -> None:
    weight = draw(3, 5, 16)
    packed, bits, assist = quantise_w4(weight)
    assert (packed.shape, packed.dtype) == ((3, 5, 2), torch.int32)
    assert (bits.shape, bits.dtype) == ((3, 1, 16), torch.int64)
    assert (assist.shape, assist.dtype) == ((3, 16), torch.float32)
    values, scale = unpack_w4(packed), bits_scale(bits)
    torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / 7)
    assert ((values * scale - weight).abs() <= 0.5001 * scale).all()
    torch.testing.assert_close(assist, 8 * (values * scale).sum(1))


def test_w4_may_have_a_scale_for_each_group_of_weights() -> None:
    weight = draw(3, 12, 16)
    (packed, bits, assist), groups = quantise_w4(weight, 4), weight.unflatten(1, (3, 4))
    values, scale = unpack_w4(packed).unflatten(1, (3, 4)), bits_scale(bits)
    # Kernels read float16, and the largest weight of a group may then be a little more than seven steps.
    assert torch.equal(scale, (groups.abs().amax(2) / 7).half().float())
    assert ((values * scale[:, :, None] - groups).abs() <= 0.504 * scale[:, :, None]).all()
    torch.testing.assert_close(assist, 8 * (values * scale[:, :, None]).sum((1, 2)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_rows_of_bytes_are_unpacked(values: list[int]) -> None:
    weight = torch.tensor(values, dtype=torch.int8).view(4, 4)
    for axis in (0, 1):
        packed = pack_rows(weight, axis)
        assert torch.equal(unpack_rows(packed, axis), weight)
    assert pack_rows(weight, 0)[0, 0].item() & 0xFF == (weight[0, 0].item() & 0xF) | (weight[1, 0].item() & 0xF) << 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_packing_is_undone(values: list[int]) -> None:
    weight = torch.tensor(values, dtype=torch.int8).view(2, 8)
    packed = pack_w4(weight)
    assert torch.equal(unpack_w4(packed), weight)
    for row, number in zip(weight.tolist(), packed.flatten().tolist(), strict=True):
        assert number & 0xFFFFFFFF == sum((v & 0xF) << (4 * i) for i, v in enumerate(row))


def test_scales_keep_their_bits_with_zeros_above() -> None:
    scale = torch.tensor([1.0, 2.0**-20, 3.3e38])
    bits = scale_bits(scale)
    assert bits.tolist() == [0x3F800000, 0x35800000, scale.view(torch.int32)[2].item()]
    assert torch.equal(bits_scale(bits), scale)


def test_assist_completes_a_product_of_halves() -> None:
    """The kernel sees x as 16 * (x // 16) + (x % 16 - 8), so it must add 8 times each weight."""
    x = torch.arange(-128, 128, dtype=torch.int32).view(16, 16)
    values = torch.randint(-8, 8, (16, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    scale = draw(8).abs()
    high, low = x >> 4, (x & 0xF) - 8
    product = (16 * high + low).double() @ values.double() * scale + assist_w4(values, scale[None])
    torch.testing.assert_close(product, x.double() @ values.double() * scale, rtol=1e-6, atol=1e-4)


def test_int4_channels_come_in_eights() -> None:
    with pytest.raises(CheckpointError, match="12 output channels; 8 share one int32"):
        quantise_w4(draw(5, 12))
