"""lowering/ascend/acl_graph/make.py: flat graphs that write in place, compute what the lowered graph computes, and compute it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.acl_graph.inspect_acl import check
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.hoist import hoist


def repeated(gamma: Any, pool: Any, x: Any, at: Any) -> tuple[Any, ...]:
    """Equal values twice, values of constants, and reads of a pool on both sides of a write."""
    before = pool.index_select(0, at).sum()
    torch.ops.npu.npu_scatter_nd_update_(pool, at[:, None], x * 2)
    after = pool.index_select(0, at).sum()
    ramp = torch.arange(4, dtype=ag.F32, device="meta").view(2, 2).t()
    return (x * 2 + torch.exp(gamma) * ramp + before + after + torch.arange(4, dtype=ag.F32, device="meta").view(2, 2).t(),)


def test_equal_values_are_computed_once_and_constants_when_weights_are_loaded() -> None:
    main, shapes = gb.Main(), [((2,), ag.F32), ((4, 2), ag.F32), ((2, 2), ag.F32), ((2,), ag.I32)]
    nodes = [main.operand(leaf, shape) for leaf, shape in zip(("params.g", "state.pool", "inputs.x", "inputs.at"), shapes, strict=True)]
    main.body("body", repeated, shapes)
    graph, signature = main.done(*main.call("body", *nodes))
    made = acl_file(hoist(graph, signature), signature, captured=True)
    names = ag.names(made)
    assert (names.count("aten.mul.Tensor"), names.count("aten.index_select.default")) == (1, 2)
    assert not {"aten.arange.default", "aten.arange.start", "aten.exp.default", "aten.t.default"} & set(names)
    assert (made.folded and made.folded.values, made.written, made.cuts) == (2, (1,), ())
    check(made, signature)
    operands = [torch.randn(2), torch.randn(4, 2), torch.randn(2, 2), torch.tensor([3, 1], dtype=ag.I32)]
    copies = [operand.clone() for operand in operands]
    (ours,), (theirs,) = Interpreter(made, Mesh())([operands])[0], Interpreter(graph, Mesh())([copies])[0]
    assert torch.equal(ours, theirs)
    assert torch.equal(operands[1], copies[1])


def test_every_body_writes_its_pools_in_place() -> None:
    graph, signature = gb.two_kinds(4)
    made = acl_file(graph, signature, captured=True)
    names = ag.names(made)
    assert names.count("npu.npu_scatter_pa_kv_cache.default") == names.count("npu.npu_recurrent_gated_delta_rule.default") == 2
    assert not [name for name in names if "functional.default" in name or "copy_" in name]
    assert len(made.written) == len(signature.state)
    assert [body for body, _ in made.calls if body] == list(dict.fromkeys(body for body, _ in made.calls if body))
    check(made, signature)


def test_lists_of_constants_alone_are_refused_where_they_are_captured() -> None:
    """The update of such a segment would be given before its replay waits for one."""
    lengths: Any = lambda: torch.full((2,), 3, dtype=ag.I64, device="meta")  # noqa: E731
    constant: Any = lambda pool, x, pages, starts: (ag.attend(x, pool, pages, lengths()) + starts[:, None],)  # noqa: E731
    ag.of_body(constant, captured=False, **ag.ATTENTION)
    with pytest.raises(LoweringError, match=r"npu_fused_infer_attention_score.* take lists of constants alone"):
        ag.of_body(constant, **ag.ATTENTION)
    # They share a segment, and its updates, with lists that the graph computes.
    both: Any = lambda pool, x, pages, starts: (ag.attend(constant(pool, x, pages, starts)[0], pool, pages, (starts + 1).long()),)  # noqa: E731
    made, _ = ag.of_body(both, **ag.ATTENTION)
    assert len(made.cuts) == 1
