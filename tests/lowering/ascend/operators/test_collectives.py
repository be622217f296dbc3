"""lowering/ascend/operators/collectives.py: what torchair makes of a collective equals the collective, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.inspect_ge import census
from npucompile.lowering.ascend.operators.call import group_of
from npucompile.lowering.ascend.operators.table import GROUP_FUNCTIONS

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


@pytest.fixture(scope="module")
def ta(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gc.gb.loaded(tmp_path_factory.mktemp("stubs"))


@pytest.mark.parametrize(("kind", "mesh", "fn", "shape"), CASES, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(CASES)])
def test_what_torchair_makes_of_a_collective_is_the_collective(ta: Any, kind: str, mesh: str, fn: Any, shape: tuple[int, ...]) -> None:
    where = Mesh.parse(mesh)
    ranks = [[gc.draw(*shape, seed=rank)] for rank in range(where.size)]
    graph, ge_file = gc.shipped(ta, lambda x: (fn(x),), ranks[0])
    assert kind in census(ge_file.graph)
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


def quantised(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(npu.npu_moe_distribute_dispatch_v2(
        x, ids, "world", 2, 0, 8, quant_mode=2, x_active_mask=mask, expert_scales=weights, global_bs=16, expert_token_nums_type=0,
    ))[:6]  # fmt: skip


def test_dispatched_rows_are_quantised_and_masked(ta: Any) -> None:
    mesh = Mesh.parse("tp=2")
    ids = gc.i32([0, 2], [3, 1], [0, 7], [4, 5])
    ranks = [[gc.draw(4, 16, seed=r, dtype=BF16), ids, torch.tensor([True, True, r == 0, False]), gc.draw(4, 2)] for r in range(2)]
    graph, ge_file = gc.shipped(ta, lambda *xs: tuple(x for x in quantised(*xs) if x.numel()), ranks[0])
    got, want = Interpreter(ge_file, mesh)(ranks), Interpreter(graph, mesh)(ranks)
    for mine, theirs in zip(got, want, strict=True):
        assert mine[0].dtype is torch.int8
        assert all(torch.equal(a.nan_to_num(-5), b.nan_to_num(-5)) for a, b in zip(mine, theirs, strict=True))


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
    ("MoeDistributeCombineV2", {}, {"comm_quant_mode": 2, "group_ep": "world"}, "comm_quant_mode is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(REFUSED)])
def test_what_has_no_meaning_is_refused(kind: str, inputs: Any, attrs: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        together(kind, [inputs] * 2, **attrs)


def test_an_operator_without_a_group_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"op \(HcomAllGather\) names no group; legal is one of tp, dp, world, dispatch"):
        group_of(gc.call("HcomAllGather", {"x": ROWS}, rank_size=2))
