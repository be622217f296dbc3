"""lowering/ascend/operators/norms.py: norms against formulas of their own, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import norms
from npucompile.lowering.ascend.operators.dense import npu_quantize


@pytest.mark.parametrize("divide", [False, True])
def test_add_rms_norm_quant_is_the_norm_then_the_rounding_of_ascend_quant(divide: bool) -> None:
    x1, x2, gamma, zero = (torch.randn(*s) for s in ((4, 32), (4, 32), (32,), (32,)))
    scales = torch.rand(32) * 20 + 1
    given = 1 / scales if divide else scales
    y1, y2, total = norms.npu_add_rms_norm_quant(x1, x2, gamma, given, zero, div_mode=divide)
    norm, _, expected = norms.npu_add_rms_norm(x1, x2, gamma)
    assert torch.equal(total, expected)
    assert int((y1 - npu_quantize(norm, scales, zero, torch.int8, -1, False)).abs().max()) <= 1, "a half may fall to either side"
    assert y2.unique().tolist() == [-128], "undefined without scales of its own"
    assert torch.equal(norms.npu_add_rms_norm_quant(x1, x2, gamma, given, zero, scales2=given, zero_points2=zero, div_mode=divide)[1], y1)
    shifted, _, _ = norms.npu_add_rms_norm_quant(x1, x2, gamma, given, zero, zero / 2, div_mode=divide)
    assert not torch.equal(shifted, y1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_of_any_dtype_is_torchs_of_doubles(dtype: torch.dtype) -> None:
    x, weight, bias = ((torch.randn(shape) + shift).to(dtype) for shape, shift in (((5, 24), 9), ((24,), 1), ((24,), 0)))
    y, mean, rstd = norms.native_layer_norm(x, [24], weight, bias, 1e-3)
    gc.near(y, torch.nn.functional.layer_norm(x.double(), [24], weight.double(), bias.double(), 1e-3))
    gc.near(mean, x.double().mean(-1, keepdim=True))
    gc.near(rstd, (x.double().var(-1, correction=0, keepdim=True) + 1e-3).rsqrt())


X = torch.ones(3, 16)
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (norms.npu_rms_norm, (X, torch.ones(8)), {}, r"gamma is \(8,\)"),
    (norms.npu_add_rms_norm, (X, X.bfloat16(), X[0]), {}, "x2 is .*bfloat16"),
    (norms.npu_add_rms_norm_quant, (X, X, X[0], X[0]), {"axis": 0}, "axis=0"),
    (norms.native_layer_norm, (X, [3, 16], X[0], X[0], 1e-6), {}, r"normalized_shape is \(3, 16\)"),
    (norms.native_layer_norm, (X, [16], X[0].bfloat16(), X[0], 1e-6), {}, "weight is .*bfloat16"),
    (norms.native_layer_norm, (X, [16], X[0], None, 1e-6), {}, "bias is absent"),
]


@pytest.mark.parametrize(("kernel", "args", "options", "message"), REFUSED)
def test_what_would_be_read_otherwise_is_refused(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        kernel(*args, **options)


def test_rows_are_what_is_normalised() -> None:
    given = {"x": torch.ones(2, 3, 16), "gamma": X[0], "beta": X[0]}
    with pytest.raises(LoweringError, match="begin_norm_axis is 1"):
        gc.run("LayerNormV3", given, begin_norm_axis=1, begin_params_axis=2, epsilon=1e-6)
