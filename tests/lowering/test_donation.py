"""lowering/donation.py: a pool is donated only where every reader of the old value precedes the write by data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from npucompile.graphs import ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.outline import outline
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.types import Aval, Bucket, Program, Signature, Tree
from npucompile.lowering.donation import Donations, donations

F32 = torch.float32
POOL, ROWS = Aval((4, 2, 1, 3), F32), Aval((2, 1, 3), F32)
INPUTS = {"x": ROWS, "slots": Aval((2,), torch.int32)}
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


def write(k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes x to both pools by an operator that donates them, and reads them afterwards."""
    k, v = ops.cache_write(k, v, x, x + 1, slots)
    return k, v, x + k.sum() - v.sum()


def dense(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool * 2, x + pool.sum()


def look(pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + pool.sum()


def peek(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.view(-1)[:6], x + 1


def both(old: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.cache_write(k, v, x + old.sum(), x, slots)  # type: ignore[no-any-return]


def graph_of(step: Step) -> tuple[GraphModule, Signature]:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return step(s, i)

    traced = trace(Program("toy", Bucket("decode", 2, 1), forward, {}, {"k": POOL, "v": POOL}, INPUTS))
    return outline(traced.graph), traced.signature


def placed(step: Step) -> tuple[Donations, GraphModule]:
    graph, signature = graph_of(step)
    return donations(graph, signature), graph


def written(s: Tree, i: Tree, x: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    k, v, x = block("write", write, (), s["k"], s["v"], x, i["slots"])
    return {"k": k, "v": v}, x


# --- what is legal ---


def one_call(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    k, x = block("dense", dense, (), s["k"], i["x"])
    return {"y": x}, {**s, "k": k}


def chain(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """Three calls, each on the previous one's result."""
    s, x = written(s, i, i["x"])
    s, x = written(s, i, x)
    s, x = written(s, i, x)
    return {"y": x}, s


def read_before(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """Each reader of a replaced value precedes the call that replaces it by data, also through other calls."""
    x = block("look", look, (), s["k"], i["x"])
    s, x = written(s, i, x * 2)
    x = block("look", look, (), s["v"], x)
    s, x = written(s, i, x)
    return {"y": x}, s


def read_after(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """The last value is not replaced."""
    s, x = written(s, i, i["x"])
    return {"y": block("look", look, (), s["k"], i["x"]), "x": x}, s


def untouched(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """A pool that no call writes may be read by all."""
    return {"y": block("look", look, (), s["k"], i["x"]), "z": block("look", look, (), s["v"], i["x"])}, s


LEGAL: dict[Step, dict[str, dict[int, int]]] = {
    one_call: {"dense": {0: 0}},
    chain: {"write": {0: 0, 1: 1}},
    read_before: {"look": {}, "write": {0: 0, 1: 1}},
    read_after: {"write": {0: 0, 1: 1}, "look": {}},
    untouched: {"look": {}},
}


@pytest.mark.parametrize("step", LEGAL, ids=lambda step: step.__name__)
def test_each_body_has_its_pools_in_one_place(step: Step) -> None:
    donated, _ = placed(step)
    assert {name: pools for name, pools in donated.bodies.items() if name in LEGAL[step]} == LEGAL[step]
    assert not any(pools for name, pools in donated.bodies.items() if name not in LEGAL[step])


@pytest.mark.parametrize("step", LEGAL, ids=lambda step: step.__name__)
def test_values_of_a_pool_are_in_its_memory(step: Step) -> None:
    """In these graphs, all nodes of the pool's aval that calls compute, and no others."""
    donated, graph = placed(step)
    pools = [node for node in graph.graph.nodes if node.op == "placeholder"][:2]
    values = {node for node in graph.graph.nodes if node.op != "output" and not isinstance(node.meta["val"], tuple)}
    assert set(donated.pools) == {node for node in values if node.meta["val"].shape == POOL.shape}
    assert all(donated.pools[pool] is pool for pool in pools)
    for node in set(donated.pools) - set(pools):
        # `write` returns its pools in the order of its operands.
        assert donated.pools[node] is pools[node.args[1]]


# --- what is refused ---


def read_beside(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    y = block("look", look, (), s["k"], i["x"])
    s, x = written(s, i, i["x"])
    return {"y": y, "x": x}, s


def read_between(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    s, x = written(s, i, i["x"])
    y = block("look", look, (), s["k"], x)
    s, x = written(s, i, x)
    return {"y": y, "x": x}, s


def two_values(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    new, x = written(s, i, i["x"])
    k, v = block("both", both, (), s["k"], new["k"], new["v"], x, i["slots"])
    return {"y": x}, {"k": k, "v": v}


def twice(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    k, v, x = block("write", write, (), s["k"], s["k"], i["x"], i["slots"])
    return {"y": x, "z": v}, {**s, "k": k}


def twice_again(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    s, x = written(s, i, i["x"])
    k, v, x = block("write", write, (), s["k"], s["k"], x, i["slots"])
    return {"y": x, "z": v}, {**s, "k": k}


def dense_chain(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    k, x = block("dense", dense, (), s["k"], i["x"])
    k, x = block("dense", dense, (), k, x)
    return {"y": x}, {**s, "k": k}


def swapped(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    new, x = written(s, i, i["x"])
    return {"y": x}, {"k": new["v"], "v": new["k"]}


def exchanged(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    return {"y": i["x"] + 1}, {"k": s["v"], "v": s["k"]}


def viewed(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    view, x = block("peek", peek, (), s["k"], i["x"])
    s, x = written(s, i, x)
    return {"y": x, "z": view + 1}, s


def returned(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    s, x = written(s, i, i["x"])
    return {"y": x, "pool": s["v"]}, s


def returned_before(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    new, x = written(s, i, i["x"])
    return {"y": x, "pool": s["v"]}, new


def kept_once(s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """The body's operand is a pool in one call and another value of the graph in the other."""
    k, x = block("dense", dense, (), s["k"], i["x"])
    y, x = block("dense", dense, (), s["v"] + 1, x)
    return {"x": x, "y": y}, {**s, "k": k}


REFUSED: dict[Step, str] = {
    read_beside: r"state.k is read by look, write and overwritten by write; legal are one call .* on whose results that call depends",
    read_between: r"state.k is read by look, write_1 and overwritten by write_1",
    two_values: r"state.k is read by both, write and overwritten by write",
    twice: r"state.k ends as a result of write, which takes arg0_1, arg0_1, .*; legal is a call that takes the pool, .* once",
    dense_chain: r"state.k ends as a result of dense_1, which takes .*; legal is a call that takes the pool, or its value from an earlier",
    swapped: r"state.k ends as arg1_1, which no call computes; legal is the pool itself, or a result of a call that takes it",
    exchanged: r"state.k ends as arg1_1, which no call computes",
    viewed: r"peek returns a view of state.k, which write writes in place; legal are values of their own",
    returned: r"state.v is written in place, and getitem_\d would be a result in its memory",
    returned_before: r"state.v is written in place, and arg1_1 would be a result in its memory",
    kept_once: r"body dense is called with pools at operands {} and at {0: 0}; legal is one place",
}  # fmt: skip


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_nothing_puts_in_order_is_refused(step: Step) -> None:
    graph, signature = graph_of(step)
    with pytest.raises(LoweringError, match=REFUSED[step]):
        donations(graph, signature)


def unpacked_again(graph: GraphModule, body: str) -> Any:
    """Adds a second, equal node for a pool's first value and gives it to the last call of a body; equal nodes are not merged."""
    call = [node for node in graph.graph.nodes if node.target == body][-1]
    value = next(node for node in call.args if node.meta["val"].shape == POOL.shape)
    with graph.graph.inserting_after(value):
        again = graph.graph.node_copy(value)
    call.args = tuple(again if i == call.args.index(value) else arg for i, arg in enumerate(call.args))
    return again, value


def test_a_value_that_is_unpacked_twice_is_one_value() -> None:
    graph, signature = graph_of(read_before)
    again, value = unpacked_again(graph, "look")
    pools_of = donations(graph, signature).pools
    assert pools_of[again] is pools_of[value]
    graph, signature = graph_of(read_between)
    unpacked_again(graph, "look")
    with pytest.raises(LoweringError, match=r"state.k is read by look, write_1 and overwritten by write_1"):
        donations(graph, signature)
    graph, signature = graph_of(twice_again)
    unpacked_again(graph, "write")
    with pytest.raises(LoweringError, match=r"state.k ends as a result of write_1, which takes .*; legal is a call that takes .* once"):
        donations(graph, signature)
