"""lowering/ascend/operators/dense.py: row-wise and dense NPU operators equal independent float64 formulas."""

import math

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import dense

FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within one rounding of the dtype."""
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.1)


def slow_norm(row: list[float], gamma: list[float], epsilon: float) -> list[float]:
    root = math.sqrt(sum(v * v for v in row) / len(row) + epsilon)
    return [v / root * w for v, w in zip(row, gamma, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gamma = torch.randn(2, 3, 16).to(dtype), torch.randn(16).to(dtype)
    y, rstd = dense.npu_rms_norm(x, gamma, 1e-3)
    wanted = torch.tensor([[slow_norm(row.tolist(), gamma.tolist(), 1e-3) for row in rows] for rows in x])
    near(y, wanted)
    assert (y.dtype, rstd.dtype, rstd.shape) == (dtype, torch.float32, (2, 3, 1))
    near(rstd[..., 0], 1 / (x.double().square().mean(-1) + 1e-3).sqrt())


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x1, x2, gamma = torch.randn(4, 16).to(dtype), torch.randn(4, 16).to(dtype), torch.randn(16).to(dtype)
    y, rstd, total = dense.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    assert torch.equal(total, x1 + x2)
    assert rstd.shape == (4, 1)
    near(y, torch.tensor([slow_norm(row.tolist(), gamma.tolist(), 1e-6) for row in total]))


def test_add_rms_norm_dynamic_quant_quantises_the_unrounded_norm() -> None:
    x1, x2, gamma = (torch.randn(*s).bfloat16() for s in ((4, 32), (4, 32), (32,)))
    smooth = torch.rand(32) + 0.5
    q1, q2, total, s1, s2 = dense.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, smooth_scale1=smooth, epsilon=1e-6)
    assert (q2.shape, s2.shape, total.dtype, s1.shape) == ((0,), (0,), torch.bfloat16, (4,))
    for row in range(4):
        norm = [v * w for v, w in zip(slow_norm(total[row].tolist(), gamma.tolist(), 1e-6), smooth.tolist(), strict=True)]
        scale = max(map(abs, norm)) / 127
        assert s1[row].item() == pytest.approx(scale, rel=1e-5)
        assert all(abs(q - v / scale) <= 0.501 for q, v in zip(q1[row].tolist(), norm, strict=True))
        assert max(map(abs, q1[row].tolist())) == 127


@pytest.mark.parametrize("divide", [False, True])
def test_add_rms_norm_quant_is_the_norm_then_the_rounding_of_ascend_quant(divide: bool) -> None:
    x1, x2, gamma, zero = (torch.randn(*s) for s in ((4, 32), (4, 32), (32,), (32,)))
    scales = torch.rand(32) * 20 + 1
    told = 1 / scales if divide else scales
    y1, y2, total = dense.npu_add_rms_norm_quant(x1, x2, gamma, told, zero, div_mode=divide)
    norm, _, expected = dense.npu_add_rms_norm(x1, x2, gamma)
    assert torch.equal(total, expected)
    assert int((y1 - dense.npu_quantize(norm, scales, zero, torch.int8, -1, False)).abs().max()) <= 1, "a half may fall to either side"
    assert y2.unique().tolist() == [-128], "undefined without scales of its own"
    assert torch.equal(dense.npu_add_rms_norm_quant(x1, x2, gamma, told, zero, scales2=told, zero_points2=zero, div_mode=divide)[1], y1)
    with pytest.raises(LoweringError, match="axis=0"):
        dense.npu_add_rms_norm_quant(x1, x2, gamma, told, axis=0)


def test_add_rms_norm_dynamic_quant_gives_the_pairs_asked_for() -> None:
    x, gamma = torch.randn(2, 8), torch.ones(8)
    q1, q2, _, s1, s2 = dense.npu_add_rms_norm_dynamic_quant(x, x, gamma, output_mask=[False, True])
    assert (q1.numel(), s1.numel(), q2.shape, s2.shape) == (0, 0, (2, 8), (2,))
    q1, q2, _, s1, s2 = dense.npu_add_rms_norm_dynamic_quant(x, x, gamma, smooth_scale1=gamma, smooth_scale2=2 * gamma)
    assert torch.equal(q1, q2)
    torch.testing.assert_close(2 * s1, s2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_activates_the_first_half(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(dtype)
    wanted = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:4], row[4:], strict=True)] for row in x.tolist()]
    near(dense.npu_swiglu(x), torch.tensor(wanted))
    assert dense.npu_swiglu(x).dtype == dtype
    assert dense.npu_swiglu(torch.ones(8, 3), 0).shape == (4, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rotary_mul_turns_pairs_half_a_head_apart(dtype: torch.dtype) -> None:
    x, angle = torch.randn(1, 5, 3, 8).to(dtype), torch.rand(1, 5, 1, 4)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angle.cos(), angle.sin()))
    y = dense.npu_rotary_mul(x, cos, sin)
    for i in range(4):
        a, b, c, s = (v[..., j].double() for v, j in ((x, i), (x, i + 4), (cos, i), (sin, i)))
        near(y[..., i], a * c - b * s)
        near(y[..., i + 4], b * c + a * s)


def test_rotary_mul_refuses_what_the_kernel_reads_otherwise() -> None:
    x = torch.zeros(1, 5, 3, 8)
    with pytest.raises(LoweringError, match="rotary_mode='interleave'"):
        dense.npu_rotary_mul(x, x, x, "interleave")
    with pytest.raises(LoweringError, match=r"r1 is \(1, 5, 1, 4\)"):
        dense.npu_rotary_mul(x, x[:, :, :1, :4], x[:, :, :1, :4])


@pytest.mark.parametrize("dtype", FLOATS)
def test_batched_product_does_not_depend_on_strides(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((192, 2, 32), (2, 32, 16)))
    strided = dense.bmm(x.transpose(0, 1), w)
    assert torch.equal(strided, dense.bmm(x.transpose(0, 1).contiguous(), w.mT.contiguous().mT))
    near(strided, torch.einsum("tbk,bkn->btn", x.double(), w.double()))
    with pytest.raises(LoweringError, match="mat2"):
        dense.bmm(x.transpose(0, 1), w.mT)


@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_takes_rows_of_outputs(dtype: torch.dtype) -> None:
    x, w, bias = torch.randn(3, 16).to(dtype), torch.randn(5, 16).to(dtype), torch.randn(5).to(dtype)
    near(dense.npu_linear(x, w, bias), torch.einsum("tk,nk->tn", x.double(), w.double()) + bias.double())
    assert torch.equal(dense.mm(x, w.t()), dense.npu_linear(x, w))
    near(dense.npu_linear(x, w), torch.einsum("tk,nk->tn", x.double(), w.double()))
    with pytest.raises(LoweringError, match="weight"):
        dense.npu_linear(x, w.t())
    with pytest.raises(LoweringError, match=r"with \[2\] dimensions"):
        dense.npu_linear(x[None], w)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quant(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 16).to(dtype)
    x[0, 0] = 0
    q, t = dense.npu_dynamic_quant(x, dst_type=1)
    assert (q.dtype, t.dtype, t.shape) == (torch.int8, torch.float32, (2, 3))
    assert t[0, 0] == 0
    assert (q[0, 0] == 0).all()
    torch.testing.assert_close(t.double(), x.double().abs().amax(-1) / 127, rtol=1e-6, atol=0)
    assert (q.double() * t[..., None] - x.double()).abs().max() <= t.max() * 0.5001
    smoothed, _ = dense.npu_dynamic_quant(x, smooth_scales=torch.linspace(0.5, 2, 16))
    assert torch.equal(smoothed, dense.npu_dynamic_quant(x.float() * torch.linspace(0.5, 2, 16))[0])


def test_dynamic_quant_refuses_other_modes() -> None:
    with pytest.raises(LoweringError, match="quant_mode='perchannel'"):
        dense.npu_dynamic_quant(torch.zeros(2, 2), quant_mode="perchannel")
    with pytest.raises(LoweringError, match="group_index"):
        dense.npu_dynamic_quant(torch.zeros(2, 2), group_index=torch.zeros(1))


@pytest.mark.parametrize(("number", "dtype"), [(15, torch.bfloat16), (torch.float32, torch.float32), (6, torch.float32)])
def test_quant_matmul_scales_an_integer_product(number: int | torch.dtype, dtype: torch.dtype) -> None:
    x, w = torch.randint(-128, 128, (3, 16), dtype=torch.int8), torch.randint(-128, 128, (16, 5), dtype=torch.int8)
    scale, rows = torch.rand(5) + 0.1, torch.rand(3) + 0.1
    total = torch.tensor([[sum(int(a) * int(b) for a, b in zip(r, c, strict=True)) for c in w.t()] for r in x])
    y = dense.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=number)
    assert y.dtype == dtype
    near(y, total * scale.double() * rows.double()[:, None])
    added = torch.randint(-1000, 1000, (5,), dtype=torch.int32)
    near(
        dense.npu_quant_matmul(x, w, scale.bfloat16(), pertoken_scale=rows, bias=added, output_dtype=number),
        (total + added) * scale.bfloat16().double() * rows.double()[:, None],
    )
    late = torch.randn(5)
    near(
        dense.npu_quant_matmul(x, w, scale[:1], bias=late, output_dtype=number),
        total * scale[:1].double() + late.double(),
    )


def test_quant_matmul_refuses_what_would_be_read_otherwise() -> None:
    x, w = torch.zeros(3, 16, dtype=torch.int8), torch.zeros(16, 5, dtype=torch.int8)
    with pytest.raises(LoweringError, match="output_dtype is None"):
        dense.npu_quant_matmul(x, w, torch.ones(5))
    with pytest.raises(LoweringError, match=r"x2 is \(5, 16\)"):
        dense.npu_quant_matmul(x, w.t(), torch.ones(5), output_dtype=15)
    with pytest.raises(LoweringError, match=r"pertoken_scale is \(3, 1\)"):
        dense.npu_quant_matmul(x, w, torch.ones(5), pertoken_scale=torch.ones(3, 1), output_dtype=15)


def test_weight_quant_batchmatmul() -> None:
    """Word p of a row holds the channels 8p to 8p + 7, the first in its lowest bits; a scale is of a group of the contraction."""
    values = torch.randint(-8, 8, (64, 16))
    words = torch.zeros(64, 2, dtype=torch.int64)
    for n in range(16):
        words[:, n // 8] |= (values[:, n] & 15) << (4 * (n % 8))
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for groups in (1, 2):
        x, scale = torch.randn(3, 64), torch.rand(groups, 16) + 0.1
        size = 64 // groups if groups > 1 else 0
        wanted = x.double() @ (values.double() * scale.double().repeat_interleave(64 // groups, 0))
        near(dense.npu_weight_quant_batchmatmul(x, packed, scale, antiquant_group_size=size), wanted)
    with pytest.raises(LoweringError, match=r"antiquant_scale is \(2, 16\); the other operands make \(1, 16\) legal"):
        dense.npu_weight_quant_batchmatmul(x, packed, scale)
    with pytest.raises(LoweringError, match=r"bias=.* has no CPU kernel"):
        dense.npu_weight_quant_batchmatmul(x, packed, scale, None, None, None, torch.zeros(16), 32)
