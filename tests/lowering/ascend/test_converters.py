"""lowering/ascend/converters.py: no launch for what GE's tensors are already, and one for softplus."""

from __future__ import annotations

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.convert import convert_body


@pytest.fixture(scope="module")
def ta(tmp_path_factory):
    return gb.loaded(tmp_path_factory.mktemp("stubs"))


X = ((8, 6), gb.BF16)
POOL = ((4, 6), gb.BF16)
ROWS = ((8, 1), gb.I32)


def types(ta, fn, *shapes):
    body = convert_body(gb.trace(FakeTensorMode(), fn, shapes), ta)
    return [op.type for op in body.ops if op.type not in ("Const", "Reshape")], body


def test_a_contiguous_copy_of_a_computed_tensor_is_no_launch(ta):
    kinds, _ = types(ta, lambda x: (x.exp().split([2, 4], 1)[1].reshape(-1),), X)
    assert kinds == ["Exp", "SplitV"]


def read_then_written(pool, x, rows):
    old = pool.view(2, 12).clone()
    torch.ops.npu.npu_scatter_nd_update_(pool, rows, x)
    return (old,)


def written_then_read(pool, x, rows):
    torch.ops.npu.npu_scatter_nd_update_(pool, rows, x)
    return (pool.clone(),)


@pytest.mark.parametrize("body", [read_then_written, written_then_read])
def test_a_copy_of_a_pool_stays(ta, body):
    """Its memory is written by an operator that GE may run before the copy's reader."""
    kinds, _ = types(ta, body, POOL, X, ROWS)
    assert kinds.count("Identity") == 1


@pytest.mark.parametrize(
    ("multiply", "shapes", "kinds"),
    [
        (lambda x, y: x * y, (X, X), ["Mul"]),
        (lambda x, y: x * y, (X, ((6,), gb.F32)), ["Cast", "Mul"]),
        (lambda x: x * 0.3, (X,), ["Muls"]),
        (lambda n: n * 3, (ROWS,), ["Mul"]),
    ],
)
def test_a_product_is_not_cast_to_the_dtype_that_it_has(ta, multiply, shapes, kinds):
    found, body = types(ta, lambda *args: (multiply(*args),), *shapes)
    assert found == kinds
    dtype = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32"}[body.results[0].val.dtype]
    assert body.ops[-1].output_desc[0].attr["_meta"].s.decode().startswith(dtype)


def test_products_of_bools_are_refused(ta):
    with pytest.raises(LoweringError, match="legal are numbers, and `&` of bools"):
        types(ta, lambda x: ((x > 0) * (x < 1),), X)


def test_what_nobody_reads_is_no_launch(ta):
    """torchair casts the indices of a maximum to int64 also where its value alone is read."""
    kinds, _ = types(ta, lambda x: (x.max(1)[0],), X)
    assert kinds == ["ArgMaxWithValue"]


def test_softplus_is_one_operator(ta):
    kinds, body = types(ta, lambda x: (torch.nn.functional.softplus(x, beta=2.0, threshold=11.0),), X)
    assert kinds == ["SoftplusV2"]
    assert (body.ops[-1].attr["beta"].f, body.ops[-1].attr["threshold"].f) == (2.0, 11.0)


@pytest.mark.parametrize("name, kind", [("amax", "ReduceMax"), ("amin", "ReduceMin")])
def test_extremes_are_one_operator_that_keeps_its_dtype(ta, name, kind):
    reduce = getattr(torch.Tensor, name)
    for fn, shape in ((lambda x: (reduce(x, 1, keepdim=True),), "bf16[8,1]"), (lambda x: (reduce(x, (0, -1)),), "bf16[]")):
        kinds, body = types(ta, fn, X)
        assert kinds == [kind]
        assert body.ops[-1].output_desc[0].attr["_meta"].s.decode() == shape
    with pytest.raises(LoweringError, match="takes GE's dtype number 3; legal are"):
        types(ta, lambda x: (reduce(x, 0),), ROWS)


@pytest.mark.parametrize(
    ("product", "adjoint"),
    [
        (lambda x, y: torch.bmm(x.exp(), y.exp().mT), (False, True)),
        (lambda x, y: torch.bmm(x.exp().mT, y.exp()), (True, False)),
        (lambda x, y: torch.bmm(x.exp(), y.exp().transpose(0, 1).contiguous()), (False, False)),
    ],
)
def test_a_transposed_factor_is_an_attribute_of_the_product(ta, product, adjoint):
    kinds, body = types(ta, lambda x, y: (product(x, y),), ((6, 6, 6), gb.F32), ((6, 6, 6), gb.F32))
    assert kinds == ["Exp", "Exp", *([] if any(adjoint) else ["Transpose"]), "BatchMatMul"]
    attr = body.ops[-1].attr
    assert (attr["adj_x1"].b, attr["adj_x2"].b) == adjoint


def test_a_transposed_factor_that_is_also_a_result_stays(ta):
    kinds, _ = types(ta, lambda x: (torch.bmm(x, x.exp().mT), x.exp().mT.contiguous() + 1), ((6, 6, 6), gb.F32))
    assert kinds.count("Transpose") == 1
