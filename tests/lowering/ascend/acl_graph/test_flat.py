"""lowering/ascend/acl_graph/flat.py: bodies are inlined, derived values become operands, and other main graphs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ordering import after
from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.flat import BODY, flat, is_fixed, writes, written_memory
from npucompile.lowering.ascend.hoist import hoist


def test_derived_values_are_operands_behind_those_of_the_program() -> None:
    main = gb.Main()
    g, x = main.operand("params.g", ((2,), ag.F32)), main.operand("inputs.x", ((2,), ag.F32))
    main.body("body", lambda x, g: (x * (1 + g),), [((2,), ag.F32)] * 2)
    graph, signature = main.done(*main.call("body", *main.call("body", x, g), g))
    made = flat(hoist(graph, signature), signature)
    nodes = list(made.graph.graph.nodes)
    assert [node.op for node in nodes] == ["placeholder"] * 3 + ["call_function"] * 2 + ["output"]
    assert (made.inputs, made.params) == (2, (0,))
    assert nodes[2].meta["leaf"] == "params.g.folded"
    assert [node.meta[BODY] for node in nodes[3:5]] == ["body", "body_1"]


def test_what_reads_or_writes_memory_that_changes_stays_where_it_is(tmp_path: Path) -> None:
    gb.loaded(tmp_path)
    graph, signature = gb.two_kinds(2)
    nodes = flat(graph, signature).graph.graph
    memory = written_memory(nodes.owning_module)
    assert {node.meta["leaf"].rpartition(".")[2] for node in memory} == {"k_pool", "v_pool", "delta", "conv"}
    for node in nodes.nodes:
        if node.op == "call_function" and ({*node.all_input_nodes, *writes(node)} & memory):
            assert is_fixed(node, memory), node
    (collective,) = [node for node in nodes.nodes if "all_reduce" in str(node.target)]
    assert is_fixed(collective, memory)
    assert not is_fixed(next(node for node in nodes.nodes if "rms_norm" in str(node.target)), memory)


def test_another_main_graph_is_refused() -> None:
    main = gb.Main()
    x = main.operand("inputs.x", ((2,), ag.F32))
    y = main.graph.call_function(torch.ops.aten.neg.default, (x,))
    y.meta["val"] = x.meta["val"]
    with pytest.raises(LoweringError, match=r"the main graph has call_function .*aten.neg.*legal are calls of bodies and getitem"):
        flat(*main.done(y))
    empty = torch.fx.Graph()
    empty.output(())
    with pytest.raises(LoweringError, match="the graph has 0 operands and 0 results, its signature"):
        flat(torch.fx.GraphModule(main.root, empty), gb.two_kinds(2)[1])


def test_an_order_of_collectives_is_that_of_the_nodes() -> None:
    """GE needs data to order what communicates; a stream does not."""

    def body(x: Any) -> tuple[Any, ...]:
        first = torch.ops._c10d_functional.all_reduce(x, "sum", "tp")
        second = torch.ops._c10d_functional.all_reduce(after(x.exp(), first), "max", "tp")
        return (first + second,)

    made, _ = ag.of_body(body, inputs_x=((2,), ag.F32))
    assert not [name for name in ag.names(made) if "after" in name]
    assert [node.args[1] for node in graph_of(made).graph.nodes if "all_reduce" in str(node.target)] == ["sum", "max"]
