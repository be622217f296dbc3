"""lowering/ascend/operators/experts.py: sorting equals plain loops, grouped products single ones, quantised ones exact integers."""

import struct
from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.quantise import quantise_rows
from npucompile.lowering.ascend.operators import experts as moe
from npucompile.lowering.ascend.operators import routing

FLOATS = [torch.float32, torch.bfloat16]
COUNTS = [3, 0, 2]
ROWS = 7


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.2)


def packed(values: torch.Tensor) -> torch.Tensor:
    """int8 [E, K, N] in -8..7 -> int32 [E, K, N/8], by Python integers."""
    words = [sum((v & 0xF) << (4 * i) for i, v in enumerate(eight)) for eight in values.view(-1, 8).tolist()]
    signed = [struct.unpack("<i", struct.pack("<I", word))[0] for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(*values.shape[:-1], -1)


def bits(scale: torch.Tensor) -> torch.Tensor:
    """f32 -> int64 with the same bits."""
    return torch.tensor([struct.unpack("<I", struct.pack("<f", v))[0] for v in scale.flatten().tolist()]).view(scale.shape)


# --- routing ---


def test_dequant_swiglu_quant_of_integers_is_that_of_the_floats() -> None:
    counts, total = torch.tensor([2, 0, 1]), torch.randint(-900, 900, (5, 8), dtype=torch.int32)
    scale, rows = torch.rand(3, 8) + 0.1, torch.rand(5, 1)
    got, got_scale = moe.npu_dequant_swiglu_quant(
        total, weight_scale=scale, activation_scale=rows, group_index=counts, activate_left=True, quant_mode=1
    )
    wide = (total * scale[torch.tensor([0, 0, 2, 2, 2])] * rows)[:3]
    want, want_scale = quantise_rows(torch.nn.functional.silu(wide[:, :4]) * wide[:, 4:])
    assert (got[:3] - want).abs().max() <= 1
    near(got_scale[:3], want_scale)
    assert got_scale[3:].isnan().all()
    again, _ = moe.npu_dequant_swiglu_quant(wide, group_index=counts, activate_left=True, quant_mode=1)
    assert (again - want).abs().max() <= 1


@pytest.mark.parametrize(
    ("options", "named"),
    [({"activate_left": False}, "activate_left"), ({"quant_mode": 0}, "quant_mode"), ({"weight_scale": torch.ones(1, 8)}, "weight_scale")],
)
def test_dequant_swiglu_quant_refuses_what_it_does_not_know(options: dict[str, Any], named: str) -> None:
    legal = {"group_index": torch.tensor([2]), "activate_left": True, "quant_mode": 1}
    with pytest.raises(LoweringError, match=named):
        moe.npu_dequant_swiglu_quant(torch.zeros(2, 8), **legal | options)


IDS = torch.tensor([[3, 0], [1, 3], [2, 1], [3, 5]], dtype=torch.int32)


def routed(ids: torch.Tensor, low: int, high: int) -> list[int]:
    """Flat indices of the choices, in the order of their rows."""
    return [i for e in range(low, high) for i, v in enumerate(ids.flatten().tolist()) if v == e]


@pytest.mark.parametrize(("low", "high"), [(0, 6), (1, 4), (4, 6)])
@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_init_routing_sorts_rows_by_expert(low: int, high: int, row_idx_type: int) -> None:
    x, scale = torch.randn(4, 3), torch.rand(4)
    rows, index, counts, scales = routing.npu_moe_init_routing_v2(
        x,
        IDS,
        scale=scale,
        active_num=8,
        expert_capacity=-1,
        expert_num=6,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[low, high],
        row_idx_type=row_idx_type,
    )
    order = routed(IDS, low, high)
    assert (rows.shape, index.dtype, counts.dtype, scales.dtype) == ((8, 3), torch.int32, torch.int64, torch.float32)
    assert torch.equal(rows[: len(order)], x[[i // 2 for i in order]])
    assert torch.equal(scales[: len(order)], scale[[i // 2 for i in order]])
    assert rows[len(order) :].isnan().all()
    assert scales[len(order) :].isnan().all()
    assert counts.tolist() == [IDS.flatten().tolist().count(e) for e in range(low, high)]
    wanted = order + [-1] * (8 - len(order)) if row_idx_type else [order.index(i) if i in order else -1 for i in range(8)]
    assert index.tolist() == wanted


def test_init_routing_counts_as_it_is_told() -> None:
    x = torch.randn(4, 3)
    sums = routing.npu_moe_init_routing_v2(x, IDS, expert_num=6, expert_tokens_num_flag=True)[2]
    assert sums.tolist() == [1, 3, 4, 7, 7, 8]
    assert routing.npu_moe_init_routing_v2(x, IDS, expert_num=6)[2].shape == ()


def test_init_routing_quantises_rows() -> None:
    x, smooth = torch.randn(4, 3).bfloat16(), torch.rand(3, 3) + 0.5
    rows, _, _, scales = routing.npu_moe_init_routing_v2(x, IDS, scale=smooth, expert_num=6, quant_mode=1, active_expert_range=[1, 4])
    order = routed(IDS, 1, 4)
    assert (rows.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row, choice in enumerate(order):
        wide = x[choice // 2].double() * smooth[IDS.flatten()[choice] - 1].double()
        assert scales[row].item() == pytest.approx(wide.abs().max().item() / 127, rel=1e-6)
        assert (rows[row] - wide / scales[row]).abs().max() <= 0.501
    assert (rows[len(order) :] == -128).all()
    assert scales[len(order) :].isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_mode": 0}, "quant_mode 0"),
        ({"active_num": 4}, "active_num 4.*legal is 8"),
        ({"drop_pad_mode": 1}, "drop_pad_mode=1"),
        ({"expert_tokens_num_type": 2}, "expert_tokens_num_type 2"),
        ({"quant_mode": 1, "scale": torch.zeros(2, 3)}, r"scale is \(2, 3\)"),
    ],
)
def test_init_routing_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        routing.npu_moe_init_routing_v2(torch.zeros(4, 3), IDS, expert_num=6, **options)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_finalize_sums_rows_by_weight(mode: int, dtype: torch.dtype) -> None:
    rows, scales = torch.randn(6, 4).to(dtype), torch.rand(3, 2).to(dtype)
    skip, bias = torch.randn(3, 4).to(dtype), torch.randn(5, 4).to(dtype)
    expert = torch.randint(0, 5, (3, 2), dtype=torch.int32)
    index = torch.tensor([4, 0, 5, 2, 1, 3], dtype=torch.int32)
    if mode in (1, 3):
        index[1], index[4] = -1, -1
    values = rows.view(2, 3, 4) if mode in (1, 3) else rows
    out = routing.npu_moe_finalize_routing(values, skip, skip, bias, scales, index, expert, drop_pad_mode=mode)
    assert out.dtype == dtype
    for t in range(3):
        total = 2 * skip[t].double()
        for x in range(2):
            at = index[t * 2 + x if mode in (2, 3) else x * 3 + t]
            row = rows[at].double() if at >= 0 else torch.zeros(4, dtype=torch.float64)
            total += scales[t, x].double() * (row + bias[expert[t, x]].double())
        near(out[t], total)


def test_finalize_without_scales_and_never_reading_an_undefined_row() -> None:
    rows = torch.tensor([[1.0], [float("nan")], [2.0], [4.0]])
    index = torch.tensor([3, 2, 0, -1], dtype=torch.int32)
    assert routing.npu_moe_finalize_routing(rows[None], None, None, None, None, index, None, 3, 2).tolist() == [[6.0], [1.0]]
    bad = index.clone()
    bad[3] = 1
    assert routing.npu_moe_finalize_routing(rows[None], None, None, None, None, bad, None, 3, 2)[1].isnan()


def test_finalize_refuses_indices_and_dtypes_the_kernel_misreads() -> None:
    rows, scales, index = torch.ones(4, 1), torch.ones(2, 2), torch.tensor([3, 2, 0, -1], dtype=torch.int32)
    with pytest.raises(LoweringError, match="row indices from -1 to 3; legal is 0 to 3"):
        routing.npu_moe_finalize_routing(rows, None, None, None, scales, index, None, drop_pad_mode=2)
    with pytest.raises(LoweringError, match=r"scales is .*float16; legal is a tensor of .*bfloat16"):
        routing.npu_moe_finalize_routing(rows.bfloat16()[None], None, None, None, scales.half(), index, None, drop_pad_mode=3)
    with pytest.raises(LoweringError, match="drop_pad_mode is 4"):
        routing.npu_moe_finalize_routing(rows, None, None, None, scales, index, None, drop_pad_mode=4)
    with pytest.raises(LoweringError, match=r"expanded_permuted_rows .* with \[3\] dimensions"):
        routing.npu_moe_finalize_routing(rows, None, None, None, scales, index, None, drop_pad_mode=3)


# --- grouped products ---


def groups(kind: int) -> torch.Tensor:
    counts = torch.tensor(COUNTS)
    return counts if kind else counts.cumsum(0)


def spans() -> list[tuple[int, int]]:
    return [(0, 3), (3, 3), (3, 5)]


PRODUCT = {"split_item": 2, "group_type": 0, "group_list_type": 1}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_matmul(dtype: torch.dtype, kind: int) -> None:
    x, w, bias = torch.randn(ROWS, 6).to(dtype), torch.randn(3, 6, 5).to(dtype), torch.randn(3, 5).to(dtype)
    x[5:] = float("nan")
    (y,) = moe.npu_grouped_matmul([x], [w], bias=[bias], group_list=groups(kind), **(PRODUCT | {"group_list_type": kind}))
    assert (y.shape, y.dtype) == ((ROWS, 5), dtype)
    for e, (low, high) in enumerate(spans()):
        near(y[low:high], x[low:high].double() @ w[e].double() + bias[e].double())
    assert y[5:].isnan().all()
    assert moe.npu_grouped_matmul([x], [w], group_list=groups(1), output_dtype=torch.float32, **PRODUCT)[0].dtype == torch.float32


class Quantised:
    """int8 rows, int8 and int4 weights of three experts, and the exact products."""

    def __init__(self, N: int = 16, parts: int = 1) -> None:
        self.x, self.rows = torch.randint(-128, 128, (ROWS, 12), dtype=torch.int8), torch.rand(ROWS) + 0.1
        self.w8 = torch.randint(-128, 128, (3, 12, N), dtype=torch.int8)
        self.w4 = torch.randint(-8, 8, (3, 12, N), dtype=torch.int8)
        self.scale = (torch.rand(3, parts, N) + 0.1) / 64
        wide = self.scale.double().repeat_interleave(12 // parts, 1)
        self.assist = (8 * (self.w4.double() * wide).sum(1)).float()
        self.bias = torch.randint(-500, 500, (3, N), dtype=torch.int32)
        self.wide = wide

    def exact(self, w: torch.Tensor, bias: torch.Tensor | None = None) -> list[torch.Tensor]:
        """[rows of each expert, N] f64: int64 products, scaled."""
        out = []
        for e, (low, high) in enumerate(spans()):
            total = (self.x[low:high, :, None].long() * w[e].long()).double() * self.wide[e]
            extra = 0.0 if bias is None else bias[e].double() * self.wide[e, 0]
            out.append((total.sum(1) + extra) * self.rows[low:high, None].double())
        return out


@pytest.mark.parametrize(("number", "dtype"), [(15, torch.bfloat16), (6, torch.float32)])
def test_grouped_matmul_w8a8(number: int, dtype: torch.dtype) -> None:
    q = Quantised()
    options = PRODUCT | {"group_list": groups(1), "output_dtype": number, "per_token_scale": [q.rows]}
    before = q.x.clone()
    for bias in (None, q.bias):
        (y,) = moe.npu_grouped_matmul([q.x], [q.w8], scale=[q.scale[:, 0]], bias=None if bias is None else [bias], **options)
        assert y.dtype == dtype
        for (low, high), wanted in zip(spans(), q.exact(q.w8, bias), strict=True):
            near(y[low:high], wanted)
        assert y[5:].isnan().all()
    assert torch.equal(q.x, before)


@pytest.mark.parametrize("parts", [1, 3])
def test_grouped_matmul_w4a8_is_exact_with_its_assist_and_destroys_x(parts: int) -> None:
    q = Quantised(parts=parts)
    wanted = q.exact(q.w4)
    options = PRODUCT | {"group_list": groups(1), "output_dtype": torch.float32, "per_token_scale": [q.rows]}
    (y,) = moe.npu_grouped_matmul([q.x], [packed(q.w4)], scale=[bits(q.scale)], bias=[q.assist], **options)
    for (low, high), part in zip(spans(), wanted, strict=True):
        near(y[low:high], part)
    assert y[5:].isnan().all()
    assert (q.x == -128).all()
    with pytest.raises(LoweringError, match="bias is absent"):
        moe.npu_grouped_matmul([q.x], [packed(q.w4)], scale=[bits(q.scale)], **options)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul_w4a16(parts: int, dtype: torch.dtype) -> None:
    """The weight plus its offset, times its scale, is a number of x's dtype; x stays what it is."""
    q = Quantised(parts=parts)
    x, scale = q.x.to(dtype), q.scale.to(dtype)
    offset = torch.randint(-3, 4, scale.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, options = x.clone(), PRODUCT | {"group_list": groups(1), "antiquant_scale": [scale]}
    (y,) = moe.npu_grouped_matmul([x], [packed(q.w4)], antiquant_offset=[offset], **options)
    assert (y.dtype, torch.equal(x, before)) == (dtype, True)
    for e, (low, high) in enumerate(spans()):
        size = q.w4.shape[1] // parts
        rows = [(q.w4[e, k].to(dtype) + offset[e, k // size]) * scale[e, k // size] for k in range(q.w4.shape[1])]
        torch.testing.assert_close(y[low:high], (x[low:high].float() @ torch.stack(rows).float()).to(dtype), rtol=1e-5, atol=1e-3)
    assert y[5:].isnan().all()
    if parts == 1:
        flat = {**options, "antiquant_scale": [scale[:, 0]], "antiquant_offset": [offset[:, 0]]}
        assert torch.equal(moe.npu_grouped_matmul([x], [packed(q.w4)], **flat)[0][:5], y[:5])
    with pytest.raises(LoweringError, match="antiquant_offset is absent"):
        moe.npu_grouped_matmul([x], [packed(q.w4)], **options)
    with pytest.raises(LoweringError, match=r"antiquant_scale is .*; legal is .* groups that divide"):
        moe.npu_grouped_matmul(
            [x], [packed(q.w4)], **{**options, "antiquant_scale": [scale.repeat(1, 5, 1)]}, antiquant_offset=[offset.repeat(1, 5, 1)]
        )


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
def test_swiglu_quant_rounds_once(int4: bool, kind: int) -> None:
    q = Quantised()
    wanted = q.exact(q.w4 if int4 else q.w8)
    if int4:
        arguments = ([packed(q.w4)], [bits(q.scale[:, 0])], q.rows, groups(kind))
        options = {"weight_assist_matrix": [q.assist]}
    else:
        arguments, options = ([q.w8], [q.scale[:, 0]], q.rows, groups(kind)), {}
    y, scale = moe.npu_grouped_matmul_swiglu_quant_v2(q.x, *arguments, group_list_type=kind, **options)
    assert (y.shape, y.dtype, scale.shape, scale.dtype) == ((ROWS, 8), torch.int8, (ROWS,), torch.float32)
    for (low, high), part in zip(spans(), wanted, strict=True):
        gate, up = part[:, :8], part[:, 8:]
        value = gate / (1 + (-gate).exp()) * up
        if low < high:
            near(scale[low:high], value.abs().amax(-1) / 127)
            assert (y[low:high] - value / scale[low:high, None]).abs().max() <= 0.51
    assert (y[5:] == -128).all()
    assert scale[5:].isnan().all()
    assert bool((q.x == -128).all()) == int4


def test_swiglu_quant_takes_groups_of_inputs_in_their_own_mode() -> None:
    q = Quantised(parts=3)
    value = q.exact(q.w4)[0]
    arguments = (q.x, [packed(q.w4)], [bits(q.scale)], q.rows, groups(1))
    options = {"weight_assist_matrix": [q.assist], "group_list_type": 1}
    with pytest.raises(LoweringError, match="dequant_mode 0, weight_scale"):
        moe.npu_grouped_matmul_swiglu_quant_v2(*arguments, **options)
    _, scale = moe.npu_grouped_matmul_swiglu_quant_v2(*arguments, dequant_mode=1, **options)
    gate, up = value.chunk(2, -1)
    near(scale[:3], (gate.sigmoid() * gate * up).abs().amax(-1) / 127)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_type": -1}, "group_type -1"),
        ({"split_item": 0}, "split_item 0"),
        ({"output_dtype": None}, "output_dtype is None"),
        ({"act_type": 1}, "act_type=1"),
        ({"per_token_scale": None}, "per_token_scale is absent"),
        ({"scale": [torch.ones(3, 16), torch.ones(3, 16)]}, "2 tensors in a list"),
        ({"scale": [torch.ones(3, 8)]}, r"scale is \(3, 1, 8\)"),
        ({"bias": [torch.ones(3, 16)]}, "bias is .*float32"),
        ({"group_list": torch.tensor([4, 4, 4])}, "do not fit 7 rows"),
        ({"antiquant_scale": [torch.ones(3, 16)]}, "antiquant_scale"),
    ],
)
def test_grouped_matmul_refuses(changes: dict[str, object], message: str) -> None:
    q = Quantised()
    options = PRODUCT | {"group_list": groups(1), "output_dtype": 15, "scale": [q.scale[:, 0]], "per_token_scale": [q.rows]}
    with pytest.raises(LoweringError, match=message):
        moe.npu_grouped_matmul([q.x], [q.w8], **(options | changes))


def test_grouped_matmul_refuses_mixed_dtypes() -> None:
    x, w = torch.ones(ROWS, 6), torch.ones(3, 6, 5)
    with pytest.raises(LoweringError, match=r"weight is .*bfloat16; legal is a tensor of .*float32"):
        moe.npu_grouped_matmul([x], [w.bfloat16()], group_list=groups(1), **PRODUCT)
    with pytest.raises(LoweringError, match="scale"):
        moe.npu_grouped_matmul([x], [w], scale=[torch.ones(3, 5)], group_list=groups(1), **PRODUCT)
