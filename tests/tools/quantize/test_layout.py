"""tools/quantize/layout.py: a matrix's tensors are those of graphs/quantise.py, and their arithmetic is that of serving stacks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.quantise import grouped_scale, quantise_w4_values
from npucompile.tools.quantize import layout
from npucompile.tools.quantize.layout import Activations, quantised

R = torch.Generator().manual_seed(0)
N, K = 8, 32
FORMS = [("w8a8", 0), ("w8a8_dynamic", 0), ("w4a8_dynamic", 0), ("w4a8_dynamic", 8), ("w4a16", 0), ("w4a16", 8)]
ACTIVATIONS = Activations(0.03, -7.0)


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, K, generator=R).to(dtype)


@given(st.lists(st.floats(2.0**-23, 6e4), min_size=2, max_size=6))
def test_scales_of_groups_come_back_from_their_two_factors(scales):
    values = torch.tensor(scales, dtype=torch.float32).repeat_interleave(4)[None] * torch.tensor([7.0, -7.0])[:, None]
    tensors, _ = quantised(values, "w4a8_dynamic", group=4)
    _, wanted = quantise_w4_values(values.t(), 4)
    assert torch.equal(grouped_scale(tensors["weight_scale"], tensors["weight_scale_second"]), wanted.t())


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_blocks_of_rows_are_rounded_as_the_whole(monkeypatch, form, group):
    values = matrix(torch.bfloat16)
    whole, floats = quantised(values, form, row=True, group=group, activations=ACTIVATIONS)
    monkeypatch.setattr(layout, "BLOCK_ELEMENTS", 3 * K)
    tensors, change, norm = layout.rounded(values, partial(layout.quantised, form=form, row=True, group=group, activations=ACTIVATIONS))
    assert list(tensors) == list(whole)
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert norm == pytest.approx(float(values.float().square().sum()))
    assert change == pytest.approx(float((floats - values).square().sum()))


def test_a_static_product_is_that_of_the_rounded_floats():
    values, x = matrix(torch.bfloat16), torch.randn(5, K, generator=R)
    tensors, floats = quantised(values, "w8a8", activations=ACTIVATIONS)
    scale, offset = tensors["input_scale"], tensors["input_offset"]
    rows = torch.round(x / scale + offset).clamp(-128, 127)
    product = (rows @ tensors["weight"].float().t() + tensors["quant_bias"]) * tensors["deq_scale"]
    torch.testing.assert_close(product, ((rows - offset) * scale) @ floats.t(), rtol=1e-5, atol=1e-4)
    assert not {"weight_scale", "weight_offset"} & set(tensors)


def test_models_of_other_dtypes_have_the_bits_of_static_scales():
    values = matrix(torch.bfloat16)
    wide, bits = (
        quantised(values.to(dtype), "w8a8", activations=ACTIVATIONS).tensors["deq_scale"] for dtype in (values.dtype, torch.float32)
    )
    assert (wide.dtype, bits.dtype) == (torch.float32, torch.int64)
    assert torch.equal(bits.to(torch.int32).view(torch.float32), wide)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0)])
def test_a_range_becomes_a_scale_and_an_offset(low, high):
    scale, offset = Activations.of_range(low, high)
    assert offset == int(offset)
    assert -128 <= offset <= 127
    for value in (min(low, 0.0), 0.0, max(high, 0.0)):
        number = max(-128, min(127, round(value / scale + offset)))
        assert abs((number - offset) * scale - value) <= 0.51 * scale
