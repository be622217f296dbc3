"""graphs/text.py: the text of a graph contains all that it computes, and none of the names that FX chose."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule

from npucompile.graphs import ops
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.text import as_text, target_name
from npucompile.graphs.types import Aval, Bucket, Program, Tree

aten = torch.ops.aten


def graph_of(prefix: str, scale: float = 2.0) -> GraphModule:
    """Every kind of argument a graph holds; node names begin with `prefix`."""
    graph, meta = Graph(), torch.empty(2, 3, device="meta")

    def add(op: str, target: object, args: tuple[object, ...], kwargs: dict[str, object] | None = None, val: object = meta):
        node = graph.create_node(op, target, args, kwargs, name=f"{prefix}_{len(graph.nodes)}")  # type: ignore[arg-type]
        node.meta["val"] = val
        return node

    x, table = add("placeholder", "x", ()), add("placeholder", "table", ())
    table.meta["leaf"] = "params.table"
    scaled = add("call_function", aten.mul.Tensor, (x, scale))
    top = add("call_function", ops.moe_route.op, (scaled, 1, True), val=(meta[:, :1], meta[:, :1].int()))
    first = add("call_function", operator.getitem, (top, 1), val=meta[:, :1].int())
    options: dict[str, object] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    cast = add("call_function", aten._to_copy.default, (first,), options, meta[:, :1].bfloat16())
    joined = add("call_function", aten.cat.default, ([scaled, cast, table], -1), val=torch.empty(2, 7, dtype=torch.float64, device="meta"))
    summed = add("call_function", torch.ops._c10d_functional.all_reduce.default, (joined, "sum", "0"), val=joined.meta["val"])
    written = add("call_function", aten.copy_.default, (table, x))
    nothing = add("call_function", ops.cache_write.inplace_op, (x, None, (1, -0.0), float("inf"), torch.contiguous_format), val=())
    assert written.op == nothing.op
    graph.output((summed, x))
    return GraphModule(torch.nn.Module(), graph)


def test_every_kind_of_line(golden: Callable[[str, str], None]) -> None:
    golden("every_kind_of_line", as_text(graph_of("n"), "every kind of line"))


def test_a_difference_from_a_golden_file_is_shown_line_by_line(golden: Callable[[str, str], None], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("golden files are being rewritten")
    changed = as_text(graph_of("n"), "every kind of line").replace("2.0", "2.5")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)-  %2 = aten.mul.Tensor\(%0, 2.0\).*\n\+  %2 = aten.mul.Tensor\(%0, 2.5\)"):
        golden("every_kind_of_line", changed)
    with pytest.raises(pytest.fail.Exception, match=r"nothing_of_that_name.txt does not exist; --update-golden writes it"):
        golden("nothing_of_that_name", changed)


def test_names_do_not_matter() -> None:
    assert as_text(graph_of("n"), "") == as_text(graph_of("other"), "").replace("operand other_0", "operand n_0")


def test_arguments_do() -> None:
    assert as_text(graph_of("n"), "") != as_text(graph_of("n", 2.5), "")
    assert as_text(graph_of("n", 1.0), "") != as_text(graph_of("n", 1), "")


def test_target_names() -> None:
    assert target_name(aten.add.Tensor) == "aten.add.Tensor"
    assert target_name(ops.linear.op) == "npuc.linear"
    assert target_name(operator.getitem) == "getitem"
    assert target_name("relu") == "relu"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_call_names_its_body_which_follows_once() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": block("twice", doubled, (), block("twice", doubled, (), i["x"]))}, s

    graph = trace(Program("toy", Bucket("decode", 2, 1), forward, {}, {}, {"x": Aval((2, 3), torch.float32)})).graph
    assert as_text(graph, "toy").splitlines() == [
        "toy",
        "  %0 = operand inputs.x : f32[2,3]",
        "  %1 = call twice(%0) : f32[2,3]",
        "  %2 = getitem(%1, 0) : f32[2,3]",
        "  %3 = call twice(%2) : f32[2,3]",
        "  %4 = getitem(%3, 0) : f32[2,3]",
        "  return [%4]",
        "",
        "body twice",
        "  %0 = operand arg0_1 : f32[2,3]",
        "  %1 = aten.mul.Tensor(%0, 2) : f32[2,3]",
        "  return [%1]",
    ]
