"""lowering/ascend/collectives.py: each collective becomes one GE operator over its symbolic group, or is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.convert import convert_body
from npucompile.lowering.ascend.ge_file import GROUP, GROUPS


@pytest.fixture(scope="module")
def ta(tmp_path_factory):
    return gb.loaded(tmp_path_factory.mktemp("stubs"))


c10 = torch.ops._c10d_functional
X = ((8, 4), gb.BF16)


def converted(ta, fn):
    body = convert_body(gb.trace(FakeTensorMode(), fn, [X]), ta)
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
