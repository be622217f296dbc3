"""lowering/ascend/hoist.py: bodies take what parameters alone decide, and the graph computes what it did before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ge_bodies as gb
from torch.fx import GraphModule

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.text import target_name
from npucompile.graphs.types import Mesh, Signature
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.fold import FOLDED
from npucompile.lowering.ascend.hoist import hoist
from npucompile.lowering.ascend.inspect_weights import LARGE_BYTES

F32 = gb.F32
X, G, A = ((4, 8), F32), ((8,), F32), ((8, 3), F32)
SIDE = 2 * int((LARGE_BYTES / 4) ** 0.5)
LARGE, COLUMN = ((SIDE, SIDE), F32), ((SIDE,), F32)


def layer(x: Any, g: Any, a: Any) -> tuple[Any, ...]:
    first, _, third = a.float().unbind(-1)
    return ((x * (1 + g) + first.exp().neg()) * third + torch.arange(8, dtype=F32, device="meta"),)


def agree(graph: GraphModule, signature: Signature) -> GraphModule:
    """The hoisted graph; both graphs give the same bits."""
    hoisted, generator = hoist(graph, signature), torch.Generator().manual_seed(0)
    operands = [torch.randn(leaf.aval.shape, generator=generator).to(leaf.aval.dtype) for leaf in signature.operands]
    ours, theirs = (Interpreter(each, Mesh())([operands])[0] for each in (hoisted, graph))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return hoisted


def single(fn: Callable[..., Any], *params: gb.Shape) -> GraphModule:
    """A graph of one call of a body that takes x and parameters; hoisted."""
    main = gb.Main()
    nodes = [main.operand(f"params.p{i}", shape) for i, shape in enumerate(params)]
    x = main.operand("inputs.x", COLUMN)
    main.body("body", fn, [COLUMN, *params])
    (y,) = main.call("body", x, *nodes)
    return agree(*main.done(y))


def ops(graph: GraphModule) -> list[str]:
    return [target_name(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_body_takes_what_each_call_derives_from_its_own_parameters() -> None:
    main = gb.Main()
    params = [main.operand(f"params.layers.{i}.{name}", shape) for i in range(2) for name, shape in (("g", G), ("a", A))]
    x = main.operand("inputs.x", X)
    main.body("layer", layer, [X, G, A])
    for layer_params in (params[:2], params[2:], params[:2]):
        (x,) = main.call("layer", x, *layer_params)
    hoisted = agree(*main.done(x))
    calls = [node for node in hoisted.graph.nodes if node.op == "call_module"]
    assert [str(call.target) for call in calls] == [FOLDED, "layer", "layer", "layer"]
    assert list(calls[0].args) == [node for node in hoisted.graph.nodes if node.op == "placeholder"][:4]
    # Three values a layer; the third call reads the first one's.
    assert len(calls[0].meta["val"]) == 6
    assert calls[1].args[1:] == calls[3].args[1:] != calls[2].args[1:]
    names = [node.meta["leaf"].removeprefix("params.layers.1.") for node in calls[2].args[1:]]
    assert names == ["a.folded", "g.folded", "a.folded_2"]
    inside = bodies(hoisted)["layer"]
    assert ops(inside) == ["aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor", "aten.arange", "aten.add.Tensor"]
    assert all(
        node.meta["val"].is_contiguous() for part in bodies(hoisted).values() for node in part.graph.nodes if node.op == "placeholder"
    )


def test_an_operand_that_is_a_parameter_in_some_calls_only_stays() -> None:
    main = gb.Main()
    g, x = main.operand("params.g", G), main.operand("inputs.x", G)
    main.body("body", lambda x, g: (x * (1 + g),), [G, G])
    (y,) = main.call("body", x, g)
    (z,) = main.call("body", g, y)
    graph, signature = main.done(z)
    assert hoist(graph, signature) is graph


def test_what_is_random_or_undefined_or_a_constant_stays() -> None:
    def body(x: Any, g: Any) -> tuple[Any, ...]:
        noise = torch.rand_like(g) + torch.empty_like(g)
        return (x + noise * 0 + torch.arange(8, device="meta") ** 2,)

    main = gb.Main()
    g, x = main.operand("params.g", G), main.operand("inputs.x", G)
    main.body("body", body, [G, G])
    graph, signature = main.done(*main.call("body", x, g))
    assert hoist(graph, signature) is graph


@pytest.mark.parametrize(
    ("body", "params", "stays", "folded"),
    [
        (lambda x, w: (w.t().contiguous() @ x,), [LARGE], [], ["aten.t", "aten.clone"]),
        (
            lambda x, w: (w[:, : SIDE // 2].contiguous() @ x.view(2, -1)[0] + w[:, SIDE // 2 :].contiguous() @ x.view(2, -1)[1],),
            [LARGE],
            [],
            ["aten.slice.Tensor", "aten.clone", "aten.slice.Tensor", "aten.clone"],
        ),
        (lambda x, w: (w.t().contiguous() @ x + w @ x,), [LARGE], ["aten.t", "aten.clone"], []),
        (lambda x, w: ((w + 1) @ x + (w * 2) @ x,), [LARGE], ["aten.add.Tensor", "aten.mv", "aten.mul.Tensor"], []),
        (lambda x, w: ((w * w[0].exp()) @ x,), [LARGE], [], ["aten.select.int", "aten.exp", "aten.mul.Tensor"]),
        (lambda x, w: (w @ x + w.sum(0).exp(),), [LARGE], [], ["aten.sum.dim_IntList", "aten.exp"]),
        (lambda x, g: ((1 + g).expand(SIDE, -1).contiguous() @ x,), [COLUMN], ["aten.expand", "aten.clone"], ["aten.add.Tensor"]),
    ],
    ids=[
        "replaces its weight",
        "parts that replace their weight",
        "beside its weight",
        "two of one weight",
        "one of a weight, read twice",
        "small beside its weight",
        "grows",
    ],
)
def test_no_large_value_is_held_beside_its_weight(
    body: Callable[..., Any], params: list[gb.Shape], stays: list[str], folded: list[str]
) -> None:
    graph = single(body, *params)
    assert ops(bodies(graph)["body"])[: len(stays)] == stays
    assert not set(ops(bodies(graph)["body"])) & set(folded)
    assert (ops(bodies(graph)[FOLDED]) if FOLDED in bodies(graph) else []) == folded


def test_two_bodies_that_read_a_large_weight_in_two_forms_leave_it_to_each() -> None:
    main = gb.Main()
    w, x = main.operand("params.w", LARGE), main.operand("inputs.x", COLUMN)
    main.body("one", lambda x, w: ((w + 1) @ x,), [COLUMN, LARGE])
    main.body("two", lambda x, w: ((w + 2) @ x,), [COLUMN, LARGE])
    (y,) = main.call("one", x, w)
    graph, signature = main.done(*main.call("two", y, w))
    assert hoist(graph, signature) is graph


def test_a_body_of_that_name_is_refused() -> None:
    main = gb.Main()
    x = main.operand("inputs.x", G)
    main.body(FOLDED, lambda x: (x + 1,), [G])
    with pytest.raises(LoweringError, match="a body is called 'folded'"):
        hoist(*main.done(*main.call(FOLDED, x)))
