"""lowering/ascend/operators/experts.py: grouped products equal single ones, quantised ones exact integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.quantise import pack_w4, quantise_rows
from npucompile.lowering.ascend.operators import experts as moe

COUNTS, SPANS, ROWS = torch.tensor([3, 0, 2]), [(0, 3), (3, 3), (3, 5)], 7
PRODUCT = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": COUNTS}


def bits(scale: torch.Tensor) -> torch.Tensor:
    """f32 -> int64 with the same bits."""
    return scale.view(torch.int32).long()


class Quantised:
    """int8 rows, int8 and int4 weights of three experts, and the exact products."""

    def __init__(self, N: int = 16, parts: int = 1) -> None:
        self.x, self.rows = torch.randint(-128, 128, (ROWS, 12), dtype=torch.int8), torch.rand(ROWS) + 0.1
        self.w8 = torch.randint(-128, 128, (3, 12, N), dtype=torch.int8)
        self.w4 = torch.randint(-8, 8, (3, 12, N), dtype=torch.int8)
        self.packed, self.scale = pack_w4(self.w4), (torch.rand(3, parts, N) + 0.1) / 64
        self.wide = self.scale.double().repeat_interleave(12 // parts, 1)
        self.assist = (8 * (self.w4.double() * self.wide).sum(1)).float()

    def exact(self, w: torch.Tensor) -> list[torch.Tensor]:
        """[rows of each expert, N] f64: int64 products, scaled."""
        totals = ((self.x[low:high, :, None].long() * w[e].long()).double() * self.wide[e] for e, (low, high) in enumerate(SPANS))
        return [total.sum(1) * self.rows[low:high, None].double() for total, (low, high) in zip(totals, SPANS, strict=True)]


@pytest.mark.parametrize(("number", "dtype"), [(15, torch.bfloat16), (6, torch.float32)])
def test_products_of_int8_are_exact(number: int, dtype: torch.dtype) -> None:
    q = Quantised()
    before, options = q.x.clone(), PRODUCT | {"output_dtype": number, "per_token_scale": [q.rows]}
    (y,) = moe.npu_grouped_matmul([q.x], [q.w8], scale=[q.scale[:, 0]], **options)
    assert y.dtype == dtype
    for (low, high), wanted in zip(SPANS, q.exact(q.w8), strict=True):
        gc.near(y[low:high], wanted)
    assert y[5:].isnan().all()
    assert torch.equal(q.x, before)


@pytest.mark.parametrize("parts", [1, 3])
def test_products_of_int4_are_exact_with_their_assist_and_destroy_x(parts: int) -> None:
    q = Quantised(parts=parts)
    wanted, options = q.exact(q.w4), PRODUCT | {"output_dtype": torch.float32, "per_token_scale": [q.rows]}
    (y,) = moe.npu_grouped_matmul([q.x], [q.packed], scale=[bits(q.scale)], bias=[q.assist], **options)
    for (low, high), part in zip(SPANS, wanted, strict=True):
        gc.near(y[low:high], part)
    assert y[5:].isnan().all()
    assert (q.x == -128).all()
    with pytest.raises(LoweringError, match="bias is absent"):
        moe.npu_grouped_matmul([q.x], [q.packed], scale=[bits(q.scale)], **options)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_beside_floats_is_made_a_float(parts: int, dtype: torch.dtype) -> None:
    """The weight plus its offset, times its scale, is a number of x's dtype; x stays what it is."""
    q = Quantised(parts=parts)
    x, scale = q.x.to(dtype), q.scale.to(dtype)
    offset = torch.randint(-3, 4, scale.shape).to(dtype)
    before, options = x.clone(), PRODUCT | {"antiquant_scale": [scale], "antiquant_offset": [offset]}
    (y,) = moe.npu_grouped_matmul([x], [q.packed], **options)
    assert (y.dtype, torch.equal(x, before)) == (dtype, True)
    for e, (low, high) in enumerate(SPANS):
        wide = (q.w4[e].to(dtype).unflatten(0, (parts, -1)) + offset[e, :, None]) * scale[e, :, None]
        torch.testing.assert_close(y[low:high], (x[low:high].float() @ wide.flatten(0, 1).float()).to(dtype), rtol=1e-5, atol=1e-3)
    assert y[5:].isnan().all()
    with pytest.raises(LoweringError, match="antiquant_offset is absent"):
        moe.npu_grouped_matmul([x], [q.packed], **options | {"antiquant_offset": None})
    many = {name: [each.repeat(1, 5, 1)] for name, each in (("antiquant_scale", scale), ("antiquant_offset", offset))}
    with pytest.raises(LoweringError, match=r"antiquant_scale is .*; legal is .* groups that divide"):
        moe.npu_grouped_matmul([x], [q.packed], **options | many)


@pytest.mark.parametrize("int4", [False, True])
def test_a_product_with_its_activation_rounds_once(int4: bool) -> None:
    q = Quantised()
    wanted, scales = q.exact(q.w4 if int4 else q.w8), q.scale[:, 0]
    weight, scale, options = (q.packed, bits(scales), {"weight_assist_matrix": [q.assist]}) if int4 else (q.w8, scales, {})
    y, y_scale = moe.npu_grouped_matmul_swiglu_quant_v2(q.x, [weight], [scale], q.rows, COUNTS, group_list_type=1, **options)
    for (low, high), (gate, up) in zip(SPANS, (part.chunk(2, -1) for part in wanted), strict=True):
        if low < high:
            value = gate.sigmoid() * gate * up
            gc.near(y_scale[low:high], value.abs().amax(-1) / 127)
            assert (y[low:high] - value / y_scale[low:high, None]).abs().max() <= 0.51
    assert (y[5:] == -128).all()
    assert y_scale[5:].isnan().all()
    assert bool((q.x == -128).all()) == int4
    with pytest.raises(LoweringError, match="dequant_mode=1"):
        moe.npu_grouped_matmul_swiglu_quant_v2(q.x, [weight], [scale], q.rows, COUNTS, group_list_type=1, dequant_mode=1)


def test_the_activation_of_integers_is_that_of_the_floats() -> None:
    counts, total = torch.tensor([2, 0, 1]), torch.randint(-900, 900, (5, 8), dtype=torch.int32)
    scale, rows = torch.rand(3, 8) + 0.1, torch.rand(5, 1)
    options = {"group_index": counts, "activate_left": True, "quant_mode": 1}
    got, got_scale = moe.npu_dequant_swiglu_quant(total, weight_scale=scale, activation_scale=rows, **options)
    wide = (total * scale[torch.tensor([0, 0, 2, 2, 2])] * rows)[:3]
    want, want_scale = quantise_rows(torch.nn.functional.silu(wide[:, :4]) * wide[:, 4:])
    assert (got[:3] - want).abs().max() <= 1
    gc.near(got_scale[:3], want_scale)
    assert got_scale[3:].isnan().all()
    assert (moe.npu_dequant_swiglu_quant(wide, **options)[0] - want).abs().max() <= 1


@pytest.mark.parametrize(
    ("options", "named"),
    [({"activate_left": False}, "activate_left"), ({"quant_mode": 0}, "quant_mode"), ({"weight_scale": torch.ones(1, 8)}, "weight_scale")],
)
def test_activations_that_are_not_known_are_refused(options: dict[str, Any], named: str) -> None:
    legal = {"group_index": torch.tensor([2]), "activate_left": True, "quant_mode": 1}
    with pytest.raises(LoweringError, match=named):
        moe.npu_dequant_swiglu_quant(torch.zeros(2, 8), **legal | options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_type": -1}, "group_type -1"),
        ({"split_item": 0}, "split_item 0"),
        ({"group_list_type": 0}, "group_list_type is 0; legal is 1"),
        ({"output_dtype": None}, "output_dtype is None"),
        ({"act_type": 1}, "act_type=1"),
        ({"per_token_scale": None}, "per_token_scale is absent"),
        ({"scale": [torch.ones(3, 16), torch.ones(3, 16)]}, "2 tensors in a list"),
        ({"scale": [torch.ones(3, 8)]}, r"scale is \(3, 1, 8\)"),
        ({"bias": [torch.ones(3, 16, dtype=torch.int32)]}, "bias=tensor"),
        ({"group_list": torch.tensor([4, 4, 4])}, "do not fit 7 rows"),
        ({"antiquant_scale": [torch.ones(3, 16)]}, "antiquant_scale"),
        ({"x": [torch.ones(ROWS, 12)]}, r"weight is .*int8; legal is a tensor of .*float32"),
        ({"x": [torch.ones(ROWS, 12)], "weight": [torch.ones(3, 12, 16)]}, "scale=\\[tensor|scale=.* has no CPU kernel"),
    ],
)
def test_products_that_are_not_known_are_refused(changes: dict[str, object], message: str) -> None:
    q = Quantised()
    options = PRODUCT | {"x": [q.x], "weight": [q.w8], "output_dtype": 15, "scale": [q.scale[:, 0]], "per_token_scale": [q.rows]}
    with pytest.raises(LoweringError, match=message):
        moe.npu_grouped_matmul(**options | changes)
