"""lowering/ascend/operators/shapes.py: what torchair makes of functions that move elements equals the functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ge_calls as gc
from torch.nn import functional

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import shapes
from npucompile.lowering.ascend.operators.call import INT4, Int4

BF16, I32 = torch.bfloat16, torch.int32
X, CUBE = gc.draw(3, 4), gc.draw(2, 3, 4)
INTS = torch.arange(12, dtype=I32).view(3, 4)
AT = torch.tensor([[2, 0], [1, 1]], dtype=I32)
WIDE = torch.tensor([[3, 0, 0, 1], [1, 2, 3, 0], [0, 0, 0, 0]])


CONVERTED: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("Identity", torch.clone, (X,)),
    ("ZerosLike", torch.zeros_like, (X,)),
    ("OnesLike", torch.ones_like, (X,)),
    ("Fill", lambda x: x + torch.full((3, 4), 2.5, device=x.device), (X,)),
    ("Range", lambda x: x + torch.arange(4, dtype=I32, device=x.device), (INTS,)),
    ("Range", lambda x: x + torch.arange(1.0, 3.0, 0.5, device=x.device), (X,)),
    ("Reshape", lambda x: x.view(2, 6), (INTS,)),
    ("Reshape", lambda x: x.permute(1, 0).reshape(-1), (X,)),
    ("Unsqueeze", lambda x: x.unsqueeze(1) + x.unsqueeze(-1).sum(), (X,)),
    ("Squeeze", lambda x: x.squeeze(0), (X[None],)),
    ("Transpose", lambda x: x.permute(2, 0, 1) * 1, (CUBE,)),
    ("BroadcastTo", lambda x: x[:, None].expand(3, 2, 4).clone(), (X,)),
    ("ConcatV2", lambda x, y: torch.cat((x, y), -1), (X, X * 2)),
    ("ConcatV2", lambda x, y: torch.cat((x, y, x)), (INTS, INTS + 1)),
    ("Pack", lambda x, y: torch.stack((x, y), 1), (X, X * 2)),
    ("Unpack", lambda x: x.unbind(-1), (X,)),
    ("SplitV", lambda x: x.split([1, 3], -1), (X,)),
    ("SplitV", lambda x: x.split(2, 0), (X,)),
    ("StridedSliceV2", lambda x: x[:, 1:3] * 1, (X,)),
    ("StridedSliceV2", lambda x: x[1:, :-1] * 1, (X,)),
    ("StridedSliceV2", lambda x: x[:, ::2] * 1, (X,)),
    ("PadV3", lambda x: functional.pad(x, (1, 2)), (INTS,)),
    ("PadV3", lambda x: functional.pad(x, (0, 1, 2, 0), value=1.5), (X,)),
    ("GatherV2", lambda x, at: x.index_select(0, at), (X, AT.flatten())),
    ("GatherV2", lambda x, at: x.index_select(1, at), (CUBE.to(BF16), AT.flatten())),
    ("GatherV2", lambda x: x[:, 2] * 1, (X,)),
    ("GatherV2", lambda x, at: functional.embedding(at, x), (X, AT)),
    ("GatherElements", lambda x, at: x.gather(1, at), (X, WIDE)),
    ("Tile", lambda x: x.repeat(2, 3), (X,)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fn", "operands"), CONVERTED, ids=gc.ids(CONVERTED))
def test_what_torchair_makes_of_a_function_is_the_function(ta: Any, kind: str, fn: Callable[..., Any], operands: Any) -> None:
    gc.assert_equal(gc.computed(ta, kind, fn, operands), fn(*operands))


DIRECT: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    ("TensorMove", {"x": X}, {}, X),
    ("Shape", {"x": CUBE}, {}, torch.tensor([2, 3, 4], dtype=I32)),
    ("Shape", {"x": CUBE}, {"dtype": 9}, torch.tensor([2, 3, 4])),
    ("Fill", {"dims": gc.i64(), "value": torch.tensor(3.0)}, {}, torch.tensor(3.0)),
    ("Fill", {"dims": gc.i64(0), "value": torch.tensor([3.0])}, {}, torch.empty(0)),
    ("Range", {"start": gc.i32(2)[0], "limit": gc.i64(5)[0], "delta": gc.i32(1)[0]}, {}, torch.tensor([2, 3, 4])),
    ("Reshape", {"x": X, "shape": gc.i64(2, -1)}, {"axis": 0, "num_axes": -1}, X.view(2, 6)),
    ("Unsqueeze", {"x": X}, {"axes": [0, -1]}, X[None, :, :, None]),
    ("Squeeze", {"x": X[None, :, None]}, {"axis": [0, -2]}, X),
    ("Squeeze", {"x": X[None, :, None]}, {"axis": []}, X),
    ("Bitcast", {"x": X}, {"type": 3}, X.view(I32)),
    ("Bitcast", {"x": X}, {"type": 2}, X[..., None].contiguous().view(torch.int8)),
    ("Concat", {"concat_dim": gc.i32(1)[0], "x0": X, "x1": X}, {"N": 2}, torch.cat((X, X), 1)),
    ("Unpack", {"x": X}, {"axis": 0, "num": 3}, (X[0], X[1], X[2])),
    ("Split", {"split_dim": gc.i32(1)[0], "x": X}, {"num_split": 2}, (X[:, :2], X[:, 2:])),
    ("SplitV", {"x": X, "size_splits": gc.i64(-1, 3), "split_dim": gc.i64(1)}, {"num_split": 2}, (X[:, :1], X[:, 1:])),
    ("GatherV2", {"x": CUBE, "indices": AT[:1], "axis": gc.i64(-1)}, {"batch_dims": 0}, CUBE[..., [[2, 0]]]),
    ("GatherV2", {"x": X, "indices": torch.tensor(-1), "axis": gc.i64(0)}, {"negative_index_support": True}, X[-1]),
    ("ScatterNdUpdate", {"var": X, "indices": gc.i32(2, 0)[:, None], "updates": X[:2] + 9}, {}, torch.stack((X[1] + 9, X[1], X[0] + 9))),
    ("Assign", {"ref": X, "value": X + 1}, {"validate_shape": True, "use_locking": False}, X + 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "want"), DIRECT, ids=gc.ids(DIRECT))
def test_forms_that_torchair_makes_elsewhere(kind: str, inputs: Any, attrs: Any, want: Any) -> None:
    gc.assert_equal(gc.flat(gc.run(kind, inputs, **attrs)), want)


def test_every_operator_is_tested() -> None:
    computed = {kind for operator in shapes.OPERATORS if operator.run is not None for kind in operator.ge}
    assert {kind for kind, *_ in CONVERTED} | {kind for kind, *_ in DIRECT} == computed - {"Cmo"} | {"ScatterNdUpdate"}, "Cmo gives nothing"


@pytest.mark.parametrize(
    ("dependency", "max_size", "offset", "message"),
    [
        (None, 8, 0, "waits for nothing; legal is a tensor"),
        (X, 0, 0, "0 bytes from 0 of 48; legal are 1 or more, from 0 to 47"),
        (X, 8, 48, "8 bytes from 48 of 48; legal"),
    ],
)
def test_a_fetch_waits_and_stays_in_its_tensor(dependency: Any, max_size: int, offset: int, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        shapes.npu_prefetch(X, dependency, max_size, offset)
    assert shapes.npu_prefetch(X, X, 64, 47) is None


def test_int4_stays_in_its_words() -> None:
    words = torch.arange(4, dtype=I32).view(2, 2)
    got = gc.run("Bitcast", {"x": words}, type=INT4, keep_dim=True)
    assert isinstance(got, Int4)
    assert got.packed is words


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Fill", {"dims": gc.i64(2), "value": X}, {}, r"value is \(3, 4\); legal is one number"),
    ("Reshape", {"x": X, "shape": gc.i64(12)}, {"axis": 1}, "attribute axis is 1"),
    ("Squeeze", {"x": X}, {"axis": [0]}, r"axes \[0\] of \(3, 4\); legal are those of size 1"),
    ("Bitcast", {"x": X.half()}, {"type": 0}, "legal are dtypes of no greater size"),
    ("Bitcast", {"x": X}, {"type": INT4, "keep_dim": True}, r"float32 as dtype number 29.*legal is int32 as 29"),
    ("Bitcast", {"x": INTS}, {"type": INT4}, "keep_dim False; legal is int32"),
    ("Bitcast", {"x": Int4(INTS)}, {"type": 3}, r"int4 in \(3, 4\) int32 as dtype number 3"),
    ("Tile", {"x": X, "multiples": gc.i64(2)}, {}, r"multiples \[2\] of \(3, 4\)"),
    ("ConcatV2", {"x0": X, "x1": INTS, "concat_dim": gc.i64(0)}, {"N": 2}, "legal is one dtype"),
    ("ConcatV2", {"x0": X, "x1": X, "concat_dim": gc.i64(0)}, {"N": 3}, "attribute N is 3"),
    ("Unpack", {"x": X}, {"axis": 0, "num": 4}, "attribute num is 4"),
    ("SplitV", {"x": X, "size_splits": gc.i64(1, 2), "split_dim": gc.i64(1)}, {"num_split": 2}, r"\[1, 2\] of \(3, 4\) along 1"),
    ("Split", {"split_dim": gc.i64(1), "x": X}, {"num_split": 3}, r"3 parts of \(3, 4\) along 1"),
    ("StridedSliceV2", {"x": X, **{s: gc.i64(-1) for s in ("begin", "end", "axes", "strides")}}, {}, "strides from 1"),
    ("StridedSliceV2", {"x": X, **{s: gc.i64(1) for s in ("begin", "end", "axes", "strides")}}, {"end_mask": 1}, "end_mask is 1"),
    ("PadV3", {"x": X, "paddings": gc.i64(1, 1), "constant_values": torch.tensor(0.0)}, {}, "legal are two a dimension"),
    ("PadV3", {"x": INTS, "paddings": gc.i64(0, 0, 1, 1), "constant_values": torch.tensor(2.0)}, {}, "pads torch.int32 with 2.0"),
    ("PadV3", {"x": X, "paddings": gc.i64(0, 0, 1, 1), "constant_values": torch.tensor(0.0)}, {"mode": "edge"}, "mode is 'edge'"),
    ("GatherV2", {"x": X, "indices": gc.i64(3), "axis": gc.i64(0)}, {}, "indices from 3 to 3; legal are 0 to 2"),
    ("GatherV2", {"x": X, "indices": gc.i64(-1), "axis": gc.i64(0)}, {}, "indices from -1 to -1; legal are 0 to 2"),
    ("GatherV2", {"x": X, "indices": gc.i64(1), "axis": gc.i64(0)}, {"batch_dims": 1}, "batch_dims is 1"),
    ("GatherElements", {"x": X, "index": WIDE - 1}, {"dim": 1}, "indices from -1"),
    ("GatherElements", {"x": X, "index": X}, {"dim": 1}, "indices are torch.float32"),
    ("ScatterNdUpdate", {"var": X, "indices": gc.i32(3)[:, None], "updates": X[:1]}, {}, "not all below the size 3"),
    ("Assign", {"ref": X, "value": X[0]}, {}, "legal is the same"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=gc.ids(REFUSED))
def test_what_has_no_meaning_is_refused(kind: str, inputs: Any, attrs: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        gc.run(kind, inputs, **attrs)
