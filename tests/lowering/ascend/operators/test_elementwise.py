"""lowering/ascend/operators/elementwise.py: what torchair makes of torch functions equals the functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ge_calls as gc
from torch.nn import functional

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import dense, elementwise

BF16 = torch.bfloat16
X, Y = gc.draw(3, 4), gc.draw(3, 4, seed=1)
ROW = gc.draw(4, seed=2)
POSITIVE = X.abs() + 0.1
INTS, OTHERS = torch.tensor([[-7, 3, 9, -2]], dtype=torch.int32), torch.tensor([[2], [-4], [5]], dtype=torch.int32)
YES, MAYBE = X > 0, Y > 0
TIES = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])

# GE type, what torchair converts to it, operands.
CONVERTED: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("Abs", torch.abs, (X,)),
    ("Neg", torch.neg, (X,)),
    ("Cos", torch.cos, (X,)),
    ("Sin", torch.sin, (X,)),
    ("Exp", torch.exp, (X,)),
    ("Exp", torch.exp, (X.to(BF16),)),
    ("Log", torch.log, (POSITIVE,)),
    ("Log1p", torch.log1p, (POSITIVE,)),
    ("Sqrt", torch.sqrt, (POSITIVE,)),
    ("Rsqrt", torch.rsqrt, (POSITIVE,)),
    ("Reciprocal", torch.reciprocal, (POSITIVE,)),
    ("Sigmoid", torch.sigmoid, (X.to(BF16),)),
    ("Swish", functional.silu, (X,)),
    ("SoftplusV2", lambda x: functional.softplus(x * 9, beta=2.0, threshold=5.0), (X,)),
    ("SoftplusV2", functional.softplus, (X.to(BF16),)),
    ("Tanh", torch.tanh, (X,)),
    ("Relu", torch.relu, (X,)),
    ("Floor", torch.floor, (X,)),
    ("Ceil", torch.ceil, (X,)),
    ("Sign", torch.sign, (X,)),
    ("Add", torch.add, (X, ROW)),
    ("Add", lambda x: x + 3, (INTS,)),
    ("Sub", torch.sub, (X, ROW)),
    ("Mul", torch.mul, (X.to(BF16), ROW.to(BF16))),
    ("Muls", lambda x: x * 0.3, (X.to(BF16),)),
    ("Addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (X, Y, ROW)),
    ("RealDiv", torch.div, (X, POSITIVE)),
    ("FloorDiv", lambda x, y: torch.div(x, y, rounding_mode="floor"), (INTS, OTHERS)),
    ("FloorMod", torch.remainder, (INTS, OTHERS)),
    ("Pow", torch.pow, (POSITIVE, ROW)),
    ("Pow", lambda x: 10000.0**x, (X,)),
    ("BitwiseAnd", torch.bitwise_and, (INTS, OTHERS)),
    ("Maximum", torch.maximum, (X, Y)),
    ("Minimum", torch.minimum, (X, Y)),
    ("Equal", torch.eq, (INTS, OTHERS + 4)),
    ("NotEqual", torch.ne, (INTS, OTHERS + 4)),
    ("Less", torch.lt, (INTS, OTHERS + 7)),
    ("LessEqual", torch.le, (INTS, OTHERS + 7)),
    ("Greater", torch.gt, (INTS, OTHERS + 7)),
    ("GreaterEqual", torch.ge, (INTS, OTHERS + 7)),
    ("LogicalAnd", torch.logical_and, (YES, MAYBE)),
    ("LogicalAnd", torch.bitwise_and, (YES, MAYBE)),
    ("LogicalOr", torch.logical_or, (YES, MAYBE)),
    ("LogicalNot", torch.logical_not, (YES,)),
    ("Cast", lambda x: x.to(torch.int32), (X * 3,)),
    ("Cast", lambda x: x.to(BF16), (X,)),
    ("Cast", lambda x: x.float(), (YES,)),
    ("Cast", lambda x: x.to(torch.int64), (INTS,)),
    ("ClipByValueV2", lambda x: x.clamp(-3, 5), (INTS,)),
    ("ClipByValueV2", lambda x: x.clamp(max=0.25), (X,)),
    ("SelectV2", torch.where, (YES, X, Y)),
    ("MaskedFill", lambda x, m: x.masked_fill(m, -2.5), (X, YES)),
    ("ReduceSum", lambda x: x.sum(-1), (X,)),
    ("ReduceSum", lambda x: x.sum((0, 1), keepdim=True), (X,)),
    ("ReduceSum", lambda x: x.sum(-1, dtype=torch.int32), (INTS,)),
    ("ReduceMean", lambda x: x.mean(0), (X,)),
    ("ReduceAny", lambda x: x.any(-1), (YES,)),
    ("Cumsum", lambda x: x.cumsum(-1), (X,)),
    ("Cumsum", lambda x: x.cumsum(-1, dtype=torch.int32), (INTS,)),
    ("ArgMaxV2", lambda x: x.argmax(-1), (TIES,)),
    ("ArgMaxV2", lambda x: x.argmax(0), (X,)),
    ("ArgMaxWithValue", lambda x: x.max(-1, keepdim=True), (TIES,)),
    ("ArgMaxWithValue", lambda x: x.max(0), (X,)),
    ("Sort", lambda x: x.sort(-1, descending=True), (X,)),
    ("Sort", lambda x: x.sort(-1, descending=True), (TIES,)),
    ("Sort", lambda x: x.sort(0), (X,)),
    ("TopKV2", lambda x: x.topk(3, -1), (X,)),
    ("TopKV2", lambda x: x.topk(1, 0, largest=False), (X,)),
    ("SoftmaxV2", lambda x: x.softmax(-1), (X,)),
    ("SoftmaxV2", lambda x: x.softmax(0), (X,)),
    ("MatMul", torch.mm, (X, gc.draw(4, 5))),
    ("BatchMatMul", torch.bmm, (gc.draw(2, 3, 4), gc.draw(2, 4, 5))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fn", "operands"), CONVERTED, ids=gc.ids(CONVERTED))
def test_what_torchair_makes_of_a_function_is_the_function(ta: Any, kind: str, fn: Callable[..., Any], operands: Any) -> None:
    gc.assert_equal(gc.computed(ta, kind, fn, operands), fn(*operands), 1e-2 if operands[0].dtype is BF16 else 1e-6)


DIRECT: list[tuple[str, dict[str, torch.Tensor], dict[str, Any], torch.Tensor]] = [
    ("AddV2", {"x1": X, "x2": ROW}, {}, X + ROW),
    ("Softplus", {"x": X}, {}, functional.softplus(X)),
    ("MatMulV2", {"x1": X, "x2": Y, "bias": gc.draw(3)}, {"transpose_x2": True, "offset_x": 0}, X @ Y.T + gc.draw(3)),
    ("MatMul", {"x1": X, "x2": Y}, {"transpose_x1": True}, X.T @ Y),
    ("BatchMatMulV2", {"x1": X[None], "x2": Y[None]}, {"adj_x1": True}, (X.T @ Y)[None]),
    ("BatchMatMul", {"x1": X[None], "x2": Y[None]}, {"adj_x2": True}, (X @ Y.T)[None]),
    ("GeluV2", {"x": X}, {"approximate": "none"}, functional.gelu(X)),
    ("GeluV2", {"x": X}, {"approximate": "tanh"}, functional.gelu(X, approximate="tanh")),
    ("Square", {"x": X}, {}, X.square()),
    ("ReduceMax", {"x": X, "axes": gc.i64(-1)}, {"keep_dims": True}, X.amax(-1, keepdim=True)),
    ("ReduceMin", {"x": X, "axes": gc.i32(0)}, {}, X.amin(0)),
    ("ReduceAll", {"x": YES, "axes": gc.i64(0)}, {"keep_dims": False}, YES.all(0)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "want"), DIRECT, ids=gc.ids(DIRECT))
def test_forms_that_torchair_makes_of_nothing_we_lower(kind: str, inputs: Any, attrs: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(gc.run(kind, inputs, **attrs), want)


def test_every_operator_is_tested() -> None:
    operators = (*elementwise.OPERATORS, *(each for each in dense.OPERATORS if each.run and not each.widens))
    assert {kind for kind, *_ in CONVERTED} | {kind for kind, *_ in DIRECT} == {
        kind for operator in operators for kind in operator.ge if kind != "MatMulV3"
    }


def test_indices_are_int32_as_ge_gives_them() -> None:
    _, order = gc.run("Sort", {"x": TIES}, axis=-1, descending=True)
    assert order.dtype is torch.int32
    assert order.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    values, order = gc.run("TopKV2", {"x": TIES, "k": gc.i32(2)}, dim=-1, largest=True, sorted=False)
    assert (order.dtype, order.tolist(), values.tolist()) == (torch.int32, [[1, 2], [0, 1]], [[3.0, 3.0], [2.0, 2.0]])
    index, most = gc.run("ArgMaxWithValue", {"x": TIES}, dimension=-1, keep_dims=False)
    assert (index.dtype, index.tolist(), most.tolist()) == (torch.int32, [1, 0], [3.0, 2.0])
    assert gc.run("ArgMaxV2", {"x": TIES, "dimension": gc.i32(-1)}, dtype=3).dtype is torch.int32


def test_sums_stay_in_their_dtype() -> None:
    assert gc.run("ReduceSum", {"x": INTS, "axes": gc.i64(1)}).dtype is torch.int32
    assert gc.run("Cumsum", {"x": INTS, "axis": gc.i64(1)}).dtype is torch.int32


F, I, B = X, INTS, YES  # noqa: E741
REFUSED: list[tuple[str, dict[str, torch.Tensor], dict[str, Any], str]] = [
    ("RealDiv", {"x1": I, "x2": I}, {}, "takes torch.int32; legal are floats"),
    ("Muls", {"x": I}, {"value": 2.0}, "legal are floats"),
    ("Exp", {"x": I}, {}, "takes torch.int32; legal are floats"),
    ("Exp", {"x": F}, {"base": 2.0}, "attribute base is 2.0"),
    ("LogicalAnd", {"x1": B, "x2": I}, {}, "legal is bool"),
    ("LogicalNot", {"x": I}, {}, "legal is bool"),
    ("Less", {"x1": F, "x2": I}, {}, "legal is one dtype"),
    ("ClipByValueV2", {"x": I, "clip_value_min": F, "clip_value_max": I}, {}, "legal is one dtype"),
    ("SelectV2", {"condition": I, "then": F, "else": F}, {}, "condition is torch.int32; legal is bool"),
    ("MaskedFill", {"x": F, "mask": B, "value": ROW}, {}, r"value \(4,\); legal are bool and one number"),
    ("ReduceSum", {"x": F, "axes": gc.i64()}, {}, "has no axes; legal is one or more"),
    ("Cumsum", {"x": F, "axis": gc.i64(0)}, {"reverse": True}, "attribute reverse is True"),
    ("TopKV2", {"x": F, "k": gc.i32(5)}, {"dim": -1}, r"5 of \(3, 4\) along -1; legal are at most all"),
    ("SoftmaxV2", {"x": F}, {"axes": [0, 1]}, r"axes are \[0, 1\]; legal is one"),
    ("MatMul", {"x1": F[None], "x2": F}, {}, "legal are 2 dimensions, floats"),
    ("MatMul", {"x1": I, "x2": OTHERS}, {}, "legal are 2 dimensions, floats"),
    ("Cast", {"x": F}, {"dst_type": 13}, "dtype number 13"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=gc.ids(REFUSED))
def test_what_has_no_meaning_is_refused(kind: str, inputs: Any, attrs: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        gc.run(kind, inputs, **attrs)
