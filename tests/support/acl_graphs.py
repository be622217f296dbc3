"""Graphs of torch operators for tests: what a lowered graph becomes, and small ones written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import ge_bodies as gb

from npucompile.graphs.types import Signature
from npucompile.lowering.artifact import graph_io
from npucompile.lowering.ascend.acl_graph.file import AclFile, graph_of
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.hoist import hoist

I32, I64, F32, BF16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
POOL, ROWS, PAGES, STARTS = ((4, 128, 16), BF16), ((2, 16), BF16), ((2, 2), I32), ((2,), I32)
ATTENTION: dict[str, gb.Shape] = {"state_pool": POOL, "inputs_x": ROWS, "inputs_pages": PAGES, "inputs_starts": STARTS}
"""Operands of bodies that call `attend`."""


def of_body(fn: Callable[..., Any], *, captured: bool = True, **operands: gb.Shape) -> tuple[AclFile, Signature]:
    """The file of a graph with one body; operands are `params_x`, `state_x` or `inputs_x`, in this order."""
    main = gb.Main()
    nodes = [main.operand(name.replace("_", ".", 1), shape) for name, shape in operands.items()]
    main.body("body", fn, list(operands.values()))
    graph, signature = main.done(*main.call("body", *nodes))
    return acl_file(hoist(graph, signature), signature, captured=captured), signature


def attend(query: Any, pool: Any, pages: Any, lengths: Any) -> Any:
    """Attention of one query a row over a paged pool [pages, P, D] of one head, in GE's form."""
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        query[:, None, None],
        pool,
        pool,
        block_table=pages,
        actual_seq_lengths_kv=lengths,
        num_heads=1,
        num_key_value_heads=1,
        scale=1.0,
        input_layout="BSND",
        block_size=pool.shape[1],
    )
    return out.view(query.shape)


def names(file: AclFile) -> list[str]:
    """Names of the operators of a file, in order."""
    return [str(node.target) for node in graph_of(file).graph.nodes if node.op == "call_function"]


def encoded(graph: torch.fx.GraphModule) -> bytes:
    """A flat graph as files hold it."""
    return graph_io.encode(graph)
