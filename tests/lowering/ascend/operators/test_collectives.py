"""lowering/ascend/operators/collectives.py: kernels equal their definitions, and what torchair makes of a collective equals these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.operators import collectives
from npucompile.lowering.ascend.operators.call import group_of
from npucompile.lowering.ascend.operators.record import Arguments
from npucompile.lowering.ascend.operators.table import GROUP_FUNCTIONS
from npucompile.lowering.ascend.shipped import GE

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
c10d, npu = torch.ops._c10d_functional, torch.ops.npu


def waited(x: torch.Tensor) -> torch.Tensor:
    got: torch.Tensor = c10d.wait_tensor(x)
    return got


# GE type, mesh, collective, shape of a rank's operand.
CASES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = [
    ("HcomAllReduce", "tp=2", lambda x: waited(c10d.all_reduce(x, "sum", "tp")), (3, 4)),
    ("HcomAllReduce", "dp=2,tp=2", lambda x: waited(c10d.all_reduce(x, "max", "dp")), (3, 4)),
    ("HcomAllReduce", "dp=2,tp=2", lambda x: waited(c10d.all_reduce(x, "min", "world")), (3, 4)),
    ("HcomAllGather", "dp=2,tp=2", lambda x: waited(c10d.all_gather_into_tensor(x, 2, "tp")), (3, 4)),
    ("HcomAllGather", "dp=2,tp=2", lambda x: waited(c10d.all_gather_into_tensor(x, 4, "world")), (3, 4)),
    ("HcomReduceScatter", "tp=2", lambda x: waited(c10d.reduce_scatter_tensor(x, "sum", 2, "tp")), (4, 4)),
    ("HcomReduceScatter", "dp=2,tp=2", lambda x: waited(c10d.reduce_scatter_tensor(x, "sum", 2, "dp")), (4, 4)),
    ("HcomAllToAll", "dp=2,tp=2", lambda x: waited(c10d.all_to_all_single(x, [2, 2], [2, 2], "tp")), (4, 3)),
    ("HcomAllToAll", "dp=2,tp=2", lambda x: waited(c10d.all_to_all_single(x, [1] * 4, [1] * 4, "world")), (4, 3)),
    ("HcomBroadcast", "dp=2,tp=2", lambda x: waited(c10d.broadcast(x, 1, "dp")), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mesh", "fn", "shape"), CASES, ids=gc.ids(CASES))
def test_what_torchair_makes_of_a_collective_is_the_collective(ta: Any, kind: str, mesh: str, fn: Any, shape: tuple[int, ...]) -> None:
    where = Mesh.parse(mesh)
    ranks = [[gc.draw(*shape, seed=rank)] for rank in range(where.size)]
    graph, ge_file = gc.shipped(ta, lambda x: (fn(x),), ranks[0])
    assert kind in GE.census(ge_file)
    got, want = Interpreter(ge_file, where)(ranks), Interpreter(graph, where)(ranks)
    for (mine,), (theirs,) in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    assert not all(torch.equal(value[0], ranks[i][0]) for i, value in enumerate(got))


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tokens are dispatched to the ranks of their experts, changed there, and combined again."""
    sent = npu.npu_moe_distribute_dispatch_v2(x, ids, "world", 4, 0, 8, quant_mode=0, expert_token_nums_type=1)
    rows = sent[0] * 2 + 1
    return (npu.npu_moe_distribute_combine_v2(rows, ids, sent[2], sent[4], weights, "world", 4, 0, 8, shared_expert_x=shared),)


def test_experts_are_visited_and_left(ta: Any) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    ranks = [
        [gc.draw(4, 16, seed=r, dtype=BF16), torch.rand(4, 8, generator=torch.Generator().manual_seed(r)).argsort(-1)[:, :3].int(),
         gc.draw(4, 3, seed=r).sigmoid(), gc.draw(4, 16, seed=r + 9, dtype=BF16)] for r in range(4)
    ]  # fmt: skip
    graph, ge_file = gc.shipped(ta, experts, ranks[0])
    got, want = Interpreter(ge_file, mesh)(ranks), Interpreter(graph, mesh)(ranks)
    for rank, (x, _, weights, shared) in enumerate(ranks):
        assert torch.equal(got[rank][0], want[rank][0])
        plain = (x * 2 + 1).float() * weights.sum(-1, keepdim=True) + shared.float()
        torch.testing.assert_close(got[rank][0].float(), plain, rtol=2e-2, atol=2e-2)


def test_dispatched_rows_are_quantised(ta: Any) -> None:
    ranks = [[gc.draw(4, 16, seed=r, dtype=BF16), gc.i32([0, 2], [3, 1], [0, 7], [4, 5])] for r in range(2)]

    def quantised(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(npu.npu_moe_distribute_dispatch_v2(x, ids, "world", 2, 0, 8, quant_mode=2, expert_token_nums_type=1))[:5]

    mesh = Mesh.parse("tp=2")
    graph, ge_file = gc.shipped(ta, quantised, ranks[0])
    for mine, theirs in zip(Interpreter(ge_file, mesh)(ranks), Interpreter(graph, mesh)(ranks), strict=True):
        assert mine[0].dtype is torch.int8
        gc.assert_equal(mine, theirs)


def together(kind: str, inputs: list[dict[str, Any]], **attrs: Any) -> list[Any]:
    calls = [gc.call(kind, value, **attrs) for value in inputs]
    assert all(group_of(call) for call in calls)
    results = GROUP_FUNCTIONS[kind](calls)
    for call in calls:
        call.finish()
    return results


def parts(x: torch.Tensor, sent: list[int], taken: list[int], at: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Inputs of an all-to-all with uneven splits, counted in elements."""

    def places(counts: list[int]) -> torch.Tensor:
        return gc.i64(*[sum(counts[:i]) for i in range(len(counts))])

    return {
        "send_data": x, "send_counts": gc.i64(*sent), "send_displacements": places(sent) if at is None else gc.i64(*at),
        "recv_counts": gc.i64(*taken), "recv_displacements": places(taken),
    }  # fmt: skip


def test_uneven_parts_are_counted_in_elements() -> None:
    rows = torch.arange(8).view(4, 2)
    first, second = together("HcomAllToAllV", [parts(rows, [6, 2], [6, 4]), parts(rows + 10, [4, 4], [2, 4])], group="tp")
    assert first.tolist() == [[0, 1], [2, 3], [4, 5], [10, 11], [12, 13]]
    assert second.tolist() == [[6, 7], [14, 15], [16, 17]]


def test_every_operator_is_tested() -> None:
    moe = {"MoeDistributeDispatchV2", "MoeDistributeCombineV2"}
    versions = {f"MoeDistribute{what}{version}" for what in ("Dispatch", "Combine") for version in ("", "V3")}
    assert {kind for kind, *_ in CASES} | {"HcomAllToAllV"} | moe | versions == set(GROUP_FUNCTIONS)


ROWS = gc.draw(4, 2)
DISPATCH = {"ep_world_size": 2, "ep_rank_id": 0, "moe_expert_num": 8, "group_ep": "world"}
SENT = {"x": gc.draw(4, 16, dtype=BF16), "expert_ids": gc.i32([0, 2], [3, 1], [0, 7], [4, 5])}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("HcomAllReduce", {"x": ROWS}, {"reduction": "avg", "group": "tp"}, r"reduction is 'avg'; legal are \['max', 'min', 'prod', 'sum'\]"),
    ("HcomAllReduce", {"x": ROWS}, {"reduction": "prod", "group": "tp"}, "reduction 'product'"),
    ("HcomAllGather", {"x": ROWS}, {"rank_size": 4, "group": "tp"}, "the node says 4 members, the group of this mesh has 2"),
    ("HcomAllToAll", {"x": ROWS[:3]}, {"group": "tp"}, "3 rows for 2 members; legal are equal parts"),
    ("HcomAllToAllV", parts(ROWS, [6, 2], [6, 2], [0, 4]), {"group": "tp"}, r"send counts \[6, 2\] at \[0, 4\] of rows of 2"),
    ("HcomAllToAllV", parts(ROWS, [5, 3], [6, 2]), {"group": "tp"}, "legal are whole rows side by side"),
    ("MoeDistributeDispatchV2", SENT, DISPATCH | {"quant_mode": 2, "y_dtype": 27}, "with quant_mode 2 as dtype number 27; legal is 2"),
    ("MoeDistributeDispatchV2", SENT, DISPATCH | {"quant_mode": 3}, "with quant_mode 3"),
    ("MoeDistributeDispatchV2", SENT, DISPATCH | {"zero_expert_num": 1}, "zero_expert_num is 1"),
    ("MoeDistributeCombineV2", {}, {"out_dtype": 1, "group_ep": "world"}, "out_dtype is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=gc.ids(REFUSED))
def test_what_has_no_meaning_is_refused(kind: str, inputs: Any, attrs: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        together(kind, [inputs] * 2, **attrs)


def test_an_operator_without_a_group_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"op \(HcomAllGather\) names no group; legal is one of tp, dp, world, dispatch"):
        group_of(gc.call("HcomAllGather", {"x": ROWS}, rank_size=2))


def calls(xs: list[torch.Tensor], *rest: object) -> list[Arguments]:
    return [((x, *rest), {}) for x in xs]


def test_all_reduce() -> None:
    xs = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, -1.0]), torch.tensor([3.0, 3.0])]
    got = collectives.all_reduce(calls(xs, "sum", "tp"))
    assert [x.tolist() for x in got] == [[6.0, 7.0]] * 3
    assert len({x.data_ptr() for x in got}) == 3
    assert collectives.all_reduce(calls(xs, "max", "tp"))[0].tolist() == [3.0, 5.0]
    assert collectives.all_reduce(calls(xs, "min", "tp"))[0].tolist() == [1.0, -1.0]
    with pytest.raises(LoweringError, match="reduction 'avg'; legal is 'sum'"):
        collectives.all_reduce(calls(xs, "avg", "tp"))


def test_sums_of_bfloat16_are_rounded_once() -> None:
    xs = [torch.full((1,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    (got, *_) = collectives.all_reduce(calls(xs, "sum", "tp"))
    assert (got.item(), got.dtype) == (258.0, torch.bfloat16)
    ints = [torch.tensor([2**30], dtype=torch.int32)] * 2
    assert collectives.all_reduce(calls(ints, "max", "tp"))[0].dtype == torch.int32


def test_a_product_is_rounded_before_its_parts_are_added() -> None:
    x, weights = torch.ones(2, 2, dtype=torch.bfloat16), [torch.tensor([[a], [1.0]], dtype=torch.bfloat16) for a in (256.0, 0.0)]
    pairs = [((x, w, "tp", 2), {"comm_mode": "aiv", "reduce_op": "sum"}) for w in weights]
    # 257 is no bfloat16.
    assert [y.tolist() for y in collectives.npu_mm_reduce_scatter_base(pairs)] == [[[256.0]]] * 2
    with pytest.raises(LoweringError, match="comm_mode is None; legal for inference is 'aiv'"):
        collectives.npu_mm_reduce_scatter_base([(args, {}) for args, _ in pairs])
    with pytest.raises(LoweringError, match=r"input \(2, 2\) has strides \(1, 2\), and the group 2 members; legal are rows"):
        collectives.npu_mm_reduce_scatter_base([((torch.randn(2, 2).t(), w.float(), "tp", 2), kwargs) for (_, w, *_), kwargs in pairs])


def test_gather_and_scatter_are_by_rank() -> None:
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    assert [x.flatten().tolist() for x in collectives.all_gather_into_tensor(calls(xs, 2, "tp"))] == [[1, 2, 3, 4]] * 2
    assert [x.tolist() for x in collectives.reduce_scatter_tensor(calls(xs, "sum", 2, "tp"))] == [[[4.0]], [[6.0]]]
    assert [x.tolist() for x in collectives.reduce_scatter_tensor(calls(xs, "max", 2, "tp"))] == [[[3.0]], [[4.0]]]
    assert [x.flatten().tolist() for x in collectives.broadcast(calls(xs, 1, "tp"))] == [[3, 4]] * 2
    with pytest.raises(LoweringError, match="the node says 4 members, the group of this mesh has 2"):
        collectives.all_gather_into_tensor(calls(xs, 4, "tp"))
    with pytest.raises(LoweringError, match="the node says 1 members"):
        collectives.reduce_scatter_tensor(calls(xs, "sum", 1, "tp"))
    with pytest.raises(LoweringError, match="does not divide by the 2 members"):
        collectives.reduce_scatter_tensor(calls([x[:1] for x in xs], "sum", 2, "tp"))
    with pytest.raises(LoweringError, match="source 2; legal is 0 to 1"):
        collectives.broadcast(calls(xs, 2, "tp"))


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3))
def test_all_to_all_transposes_the_parts(sizes: list[list[int]]) -> None:
    xs = [torch.tensor([100 * i + 10 * j for j, n in enumerate(row) for _ in range(n)]) for i, row in enumerate(sizes)]
    given_ = [((x, [row[i] for row in sizes], sizes[i], "tp"), {}) for i, x in enumerate(xs)]
    for i, got in enumerate(collectives.all_to_all_single(given_)):
        assert got.tolist() == [100 * j + 10 * i for j in range(3) for _ in range(sizes[j][i])]


def test_all_to_all_refuses_splits_that_disagree() -> None:
    x = torch.zeros(4)
    with pytest.raises(LoweringError, match=r"member 1 takes \[1, 3\] rows, the members send it \[2, 2\]"):
        collectives.all_to_all_single([((x, [2, 2], [2, 2], "tp"), {}), ((x, [1, 3], [2, 2], "tp"), {})])
    with pytest.raises(LoweringError, match=r"member 0 of 2 sends \[2, 1\]"):
        collectives.all_to_all_single(calls([x, x], [2, 2], [2, 1], "tp"))
