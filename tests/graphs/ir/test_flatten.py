"""graphs/ir/flatten.py: a graph that calls bodies, its flat form and its outlined form compute what the untraced function computes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from npucompile.graphs.cost import cost
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies, flatten
from npucompile.graphs.ir.outline import outline
from npucompile.graphs.ir.trace import TracedProgram, trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.text import as_text, target_name
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree

F32 = torch.float32


def traced(step: Any, inputs: int = 2) -> TracedProgram:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return step(*i), s

    return trace(Program("toy", Bucket("decode", 3, 1), forward, {}, {}, [Aval((3, 4), F32)] * inputs))


def targets(graph: GraphModule) -> list[str]:
    return [target_name(n.target) if n.op == "call_function" else str(n.target) for n in graph.graph.nodes if n.op.startswith("call")]


def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sin(x) + y, x


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(2):
        x, y = block("pair", pair, (), x, y)
    return x * 2, y


def test_every_call_is_a_copy_of_its_body() -> None:
    graph = traced(chain).graph
    assert list(bodies(graph)) == ["pair"]
    before = as_text(graph, "")
    flat = flatten(graph)
    assert targets(flat) == ["aten.sin", "aten.add.Tensor"] * 2 + ["aten.mul.Tensor"], "a result that is an operand needs no node"
    assert bodies(flat) == {}
    assert as_text(graph, "") == before, "the graph is left alone"
    assert all("val" in n.meta for n in flat.graph.nodes if n.op != "output")
    flat.graph.lint()
    assert cost(flat) == cost(graph)


def test_copies_share_no_metadata() -> None:
    flat = flatten(traced(chain).graph)
    sines = [n for n in flat.graph.nodes if n.target is torch.ops.aten.sin.default]
    sines[0].meta["mark"] = 1
    assert "mark" not in sines[1].meta


def nested() -> GraphModule:
    """A body that calls a body; `block` never makes one, but flattening supports it."""
    graph = traced(chain).graph
    inner, outer = bodies(graph)["pair"], traced(lambda x, y: (x + y, y)).graph
    root = torch.nn.Module()
    root.pair = inner
    new = torch.fx.Graph()
    x, y = new.placeholder("x"), new.placeholder("y")
    call = new.call_module("pair", (y, x))
    new.output((new.call_function(operator.getitem, (call, 0)),))
    swapped = GraphModule(root, new)
    setattr(graph, "pair", swapped)  # noqa: B010
    assert outer is not None
    return graph


def test_bodies_of_bodies_flatten_too() -> None:
    graph = nested()
    x, y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    flat = flatten(graph)
    assert targets(flat) == ["aten.sin", "aten.add.Tensor"] * 2 + ["aten.mul.Tensor"]
    for got, want in zip(flat(x, y), graph(x, y), strict=True):
        assert torch.equal(got, want)


# --- random programs, in every form ---


def mixed(scale: float, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * scale + y, torch.maximum(x, y)


def rotated(scale: float, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x[1:], y[:1]]) * scale, x


def reduced(scale: float, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = (x.softmax(-1) + y) * scale
    return both, both.sum(0, keepdim=True).expand(3, 4).contiguous()


FUNCTIONS = [mixed, rotated, reduced]
STEP = st.tuples(st.integers(0, 2), st.sampled_from([1.0, 0.5]), st.booleans(), st.integers(0, 99), st.integers(0, 99))


@settings(max_examples=20)
@given(st.lists(STEP, min_size=1, max_size=7), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_random_programs_compute_the_same_in_every_form(steps: list[Any], returned: list[int]) -> None:
    """The untraced function, the traced graph, its flat, outlined and optimised forms, and combinations of them agree."""

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        known = list(values)
        for which, scale, loose, a, b in steps:
            x, y = known[a % len(known)], known[b % len(known)]
            if loose:
                known.append(x * scale - y)
            else:
                known += block(FUNCTIONS[which].__name__, FUNCTIONS[which], (scale,), x, y)
        return [known[i % len(known)] for i in returned]

    operands = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
    program = traced(step)
    kinds = {(which, scale) for which, scale, loose, *_ in steps if not loose}
    assert len(bodies(program.graph)) <= len(kinds), "calls that nobody reads are gone"
    best = optimise(partition(program, Mesh(), Rules())).graph
    want = step(*operands)
    outlined = outline(program.graph)
    assert all(n.op != "call_function" or n.target is operator.getitem for n in outlined.graph.nodes)
    for form in (program.graph, flatten(program.graph), outlined, flatten(outlined), best, flatten(best), outline(best), outline(outlined)):
        form.graph.lint()
        for got, expected in zip(form(*operands), want, strict=True):
            assert torch.equal(got, expected)
    assert as_text(outline(outlined), "") == as_text(outlined, ""), "nothing is left to outline"
    assert cost(flatten(outlined)) == cost(program.graph)
    assert sorted(targets(flatten(outlined))) == sorted(targets(flatten(program.graph)))
