"""lowering/ascend/operators/dense.py: what comparing lowerings with references (test_ge_ops.py, test_ge_moe.py) does not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batched_product_does_not_depend_on_strides(dtype: torch.dtype) -> None:
    x, w = (torch.randn(shape).to(dtype) for shape in ((192, 2, 32), (2, 32, 16)))
    strided = dense.bmm(x.transpose(0, 1), w)
    assert torch.equal(strided, dense.bmm(x.transpose(0, 1).contiguous(), w.mT.contiguous().mT))
    gc.near(strided, torch.einsum("tbk,bkn->btn", x.double(), w.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_before_rounding(dtype: torch.dtype) -> None:
    x, w, bias = torch.randn(3, 16).to(dtype), torch.randn(5, 16).to(dtype), torch.randn(5).to(dtype)
    gc.near(dense.npu_linear(x, w, bias), x.double() @ w.double().t() + bias.double())
    assert torch.equal(dense.mm(x, w.t()), dense.npu_linear(x, w))


X, X4, Q, W = torch.ones(3, 16), torch.ones(1, 5, 3, 8), torch.ones(3, 16, dtype=torch.int8), torch.ones(16, 5, dtype=torch.int8)
PACKED = torch.zeros(64, 2, dtype=torch.int32)
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (dense.npu_rotary_mul, (X4, X4, X4, "interleave"), {}, "rotary_mode='interleave'"),
    (dense.npu_rotary_mul, (X4, X4[:, :, :1, :4], X4[:, :, :1, :4]), {}, r"r1 is \(1, 5, 1, 4\)"),
    (dense.bmm, (X[None], X[None]), {}, "mat2"),
    (dense.npu_linear, (X, X.t()), {}, "weight"),
    (dense.npu_linear, (X[None], X), {}, r"with \[2\] dimensions"),
    (dense.npu_dynamic_quant, (X,), {"quant_mode": "perchannel"}, "quant_mode='perchannel'"),
    (dense.npu_dynamic_quant, (X,), {"group_index": X}, "group_index"),
    (dense.npu_quantize, (X, X[0], None, torch.int8, 0, False), {}, "axis=0 of 2 dimensions"),
    (dense.npu_quantize, (X, X[0], None, torch.int8, -1), {}, "div_mode=True has no CPU kernel"),
    (dense.npu_quant_matmul, (Q, W, X[0, :5]), {}, "output_dtype is None"),
    (dense.npu_quant_matmul, (Q, W.t(), X[0, :5]), {"output_dtype": 15}, r"x2 is \(5, 16\)"),
    (dense.npu_quant_matmul, (Q, W, X[0, :5]), {"pertoken_scale": X[:, :1], "output_dtype": 15}, r"pertoken_scale is \(3, 1\)"),
    (dense.npu_quant_matmul, (Q, W, X[0, :5]), {"bias": X[0, :5], "output_dtype": 15}, "bias is .*float32; legal is a tensor of .*int32"),
    (dense.npu_weight_quant_batchmatmul, (torch.ones(3, 64), PACKED, torch.ones(2, 16)), {}, r"antiquant_scale is \(2, 16\); the other"),
    (dense.npu_weight_quant_batchmatmul, (torch.ones(3, 64), PACKED, torch.ones(2, 16)), {"bias": X}, "bias=.* has no CPU kernel"),
]


@pytest.mark.parametrize(("kernel", "args", "options", "message"), REFUSED)
def test_what_would_be_read_otherwise_is_refused(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        kernel(*args, **options)
