"""lowering/ascend/converters.py: what torchair writes with the converters of the operators' records, and for copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ordering import after
from npucompile.lowering.ascend.convert import convert_body
from npucompile.lowering.ascend.ge_file import GROUP, GROUPS

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
    converted, body = types(ta, lambda *args: (multiply(*args),), *shapes)
    assert converted == kinds
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


@pytest.mark.parametrize("renorm", [0, 1])
def test_gating_has_the_attributes_of_its_definition(ta, renorm):
    gate = torch.ops.npu.npu_moe_gating_top_k_softmax_v2
    (kind,), body = types(ta, lambda x: gate(x, k=3, renorm=renorm)[:2], ((5, 9), gb.F32))
    gating = body.ops[-1]
    written = {name: value.i for name, value in gating.attr.items() if not name.startswith("_")}
    assert (kind, {"renorm": 0, **written}) == ("MoeGatingTopKSoftmaxV2", {"k": 3, "renorm": renorm})
    assert [desc.name for desc in gating.output_desc] == ["y", "expert_idx", "softmax_result"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_dispatch_waits_for_what_was_ordered_before_it(ta, ordered):
    def run(x, ids):
        first = x.exp()
        dispatch = torch.ops.npu.npu_moe_distribute_dispatch_v2
        return first, dispatch(after(x, first) if ordered else x, ids, "dispatch", 4, 0, 8)[0]

    _, body = types(ta, run, ((5, 16), gb.BF16), ((5, 3), gb.I32))
    (sent,) = (op for op in body.ops if op.type == "MoeDistributeDispatchV2")
    edges = [tensor.removesuffix(":-1") for tensor in sent.input if tensor.endswith(":-1")]
    assert edges == [op.name for op in body.ops if op.type == "Exp" and ordered]


c10 = torch.ops._c10d_functional
WIDE = ((8, 4), gb.BF16)


def converted(ta, fn):
    body = convert_body(gb.trace(FakeTensorMode(), fn, [WIDE]), ta)
    return body, [op for op in body.ops if op.type != "Const"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "name, args, kind, attrs, rows",
    [
        ("all_reduce", ("sum",), "HcomAllReduce", {"reduction": b"sum", "fusion": 0}, 8),
        ("all_reduce", ("max",), "HcomAllReduce", {"reduction": b"max"}, 8),
        ("all_reduce", ("product",), "HcomAllReduce", {"reduction": b"prod"}, 8),
        ("all_gather_into_tensor", (4,), "HcomAllGather", {"rank_size": 4}, 32),
        ("reduce_scatter_tensor", ("sum", 2), "HcomReduceScatter", {"reduction": b"sum", "rank_size": 2}, 4),
        ("all_to_all_single", ([2] * 4, [2] * 4), "HcomAllToAll", {}, 8),
        ("broadcast", (3,), "HcomBroadcast", {"root_rank": 3, "fusion": 0}, 8),
    ],
)
def test_each_collective_is_one_operator_with_its_symbolic_group(ta, group, name, args, kind, attrs, rows):
    body, ops = converted(ta, lambda x: (c10.wait_tensor(getattr(c10, name)(x, *args, group)),))
    assert [op.type for op in ops] == [kind]
    assert ops[0].attr["group"].s.decode() == group
    for key, value in attrs.items():
        assert (ops[0].attr[key].s if isinstance(value, bytes) else ops[0].attr[key].i) == value
    assert list(ops[0].input) == ["x_1:0"]
    assert body.results[0].tensor == f"{ops[0].name}:0"
    assert body.results[0].val.shape == (rows, 4)
    assert body.patches == ((ops[0].name, "group", GROUP),)


def test_unequal_splits_are_counted_in_elements(ta):
    taken, sent = [1, 2, 3, 2], [4, 2, 1, 1]
    body, ops = converted(ta, lambda x: (c10.wait_tensor(c10.all_to_all_single(x, taken, sent, "world")),))
    assert [op.type for op in ops] == ["HcomAllToAllV"]
    consts = {f"{op.name}:0": torch.frombuffer(bytearray(op.attr["value"].t.data), dtype=torch.int64).tolist() for op in body.ops[:-1]}
    assert [consts[tensor] for tensor in ops[0].input[1:]] == [[16, 8, 4, 4], [0, 16, 24, 28], [4, 8, 12, 8], [0, 4, 12, 24]]
    assert ops[0].input[0] == "x_1:0"


def test_an_even_split_that_is_not_equal_on_both_sides_needs_counts(ta):
    _, ops = converted(ta, lambda x: (c10.wait_tensor(c10.all_to_all_single(x, [1, 1], [4, 4], "dp")),))
    assert [op.type for op in ops] == ["HcomAllToAllV"]


def test_waiting_adds_nothing(ta):
    _, ops = converted(ta, lambda x: (c10.wait_tensor(c10.wait_tensor(c10.all_reduce(x, "sum", "tp"))) + 1,))
    assert [op.type for op in ops] == ["HcomAllReduce", "Add"]


def test_reductions_that_ge_lacks_are_refused(ta):
    with pytest.raises(LoweringError, match="reduces by 'avg', GE by max, min, product, sum"):
        converted(ta, lambda x: (c10.wait_tensor(c10.all_reduce(x, "avg", "tp")),))


# torchair asks torch for a group's device in a way that torch warns of.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_groups_that_are_no_symbols_go_where_torchair_sends_them(ta):
    with pytest.raises(LoweringError, match="Could not resolve the process group registered under the name nobody"):
        converted(ta, lambda x: (c10.wait_tensor(c10.all_reduce(x, "sum", "nobody")),))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        name = dist.group.WORLD.group_name
        with pytest.raises(LoweringError, match="group 'tag=ptd:0;rank_list=0,1'; legal are tp, dp, world"):
            converted(ta, lambda x: (c10.wait_tensor(c10.all_reduce(x, "sum", name)),))
    finally:
        dist.destroy_process_group()


def test_a_group_without_a_converter_of_torchairs_is_refused_by_name(ta):
    with pytest.raises(LoweringError, match="is over group 'nobody'; legal are tp, dp, world"):
        converted(ta, lambda x: (c10.wait_tensor(c10.all_to_all_single(x, [4, 4], [4, 4], "nobody")),))
