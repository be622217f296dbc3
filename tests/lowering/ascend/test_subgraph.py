"""lowering/ascend/subgraph.py: a part of a graph computes what it computes in the whole, with writes in place and constants."""

from __future__ import annotations

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.subgraph import WholeGraph

POOL, ROWS, AT = torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([[1]], dtype=torch.int32)


@pytest.fixture
def whole():
    hand = gc.Hand()
    pool, rows, at = hand.data(0, "f32[4,2]"), hand.data(1, "f32[1,2]"), hand.data(2, "i32[1,1]")
    doubled = hand.op("Add", {"x1": rows, "x2": rows}, "a/add", ["f32[1,2]"])
    written = hand.op("ScatterNdUpdate", {"var": pool, "indices": at, "updates": doubled}, "a/write", ["f32[4,2]"], use_locking=False)
    axes = hand.op("Const", {}, "b/axes", ["i64[1]"], value=gc.i64(0))
    summed = hand.op("ReduceSum", {"x": written, "axes": axes}, "b/sum", ["f32[2]"], keep_dims=False)
    return WholeGraph(hand.done(summed, inputs=3, bound=(0,)))


VALUES = {"x0:0": POOL, "x1:0": ROWS, "x2:0": AT, "a/add:0": 2 * ROWS, "a/write:0": POOL, "b/sum:0": torch.zeros(2)}


def run(part, *operands):
    own = [operand.clone() for operand in operands]
    (results,) = Interpreter(part.ge_file, Mesh())([own])
    return results, own


def test_one_operator_is_a_graph_and_its_constants_come_with_it(whole):
    part = whole.cut(["b/sum"], VALUES)
    assert (part.operands, part.results, part.written) == (("a/write:0",), ("b/sum:0",), ())
    assert run(part, torch.ones(4, 2))[0][0].tolist() == [4, 4]


def test_a_write_that_nobody_reads_is_bound_to_an_output(whole):
    part = whole.cut(["a/write"], VALUES)
    assert (part.operands, part.results, part.written) == (("x0:0", "x2:0", "a/add:0"), (), (0,))
    assert (part.ge_file.donations, part.ge_file.bound) == (((0, 0),), ())
    results, own = run(part, POOL, AT, 2 * ROWS)
    assert (results, own[0].tolist()) == ([], [[0, 0], [2, 2], [0, 0], [0, 0]])


def test_a_write_that_the_part_reads_is_not(whole):
    part = whole.cut(["a/write", "b/sum"], VALUES)
    assert (part.ge_file.donations, part.ge_file.bound, part.results) == ((), (0,), ("b/sum:0",))
    results, own = run(part, POOL, AT, 3 * ROWS)
    assert (results[0].tolist(), own[0][1].tolist()) == ([3, 3], [3, 3])


def test_bodies_are_the_operators_of_a_prefix(whole):
    assert whole.bodies() == {"a": ["a/add", "a/write"], "b": ["b/axes", "b/sum"]}


def test_an_operand_may_be_another_tensor(whole):
    part = whole.cut(["a/add", "b/sum"], VALUES, ["b/sum:0"], {"a/write:0": "a/add:0"})
    assert part.operands == ("x1:0",)
    assert run(part, torch.tensor([[3.0, 4.0]]))[0][0].tolist() == [6, 8]


def test_an_operand_without_a_known_shape_is_refused(whole):
    with pytest.raises(LoweringError, match="nothing is known of x0:0"):
        whole.cut(["a/write"], {"a/write:0": POOL, "a/add:0": ROWS, "x2:0": AT})
