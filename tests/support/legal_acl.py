"""A graph of torch operators in which every operator is legal: the step of legal_graph.py, as a captured graph has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from support import acl_graphs as ag
from support import ge_bodies as gb
from support import legal_graph
from torch.fx import Node

from npucompile.lowering.artifact import graph_io
from npucompile.lowering.ascend.acl_graph.file import AclFile

npu, packages = torch.ops.npu, "npucompile_packages"
T, H, W, SLOTS = 8, 4, 128, 9


def legal(cache: Path) -> AclFile:
    """Attention over pages, the delta rule, and int8 experts on other devices; its weights are in NZ."""
    gb.loaded(cache)
    made, _ = ag.of_body(legal_graph.step, **{name.replace(".", "_", 1): shape for name, shape in legal_graph.SHAPES.items()})
    return made


def with_packages(cache: Path) -> AclFile:
    """The operators of vllm-ascend, for four sequences of two tokens."""
    from npucompile.lowering.ascend.packages import declare

    gb.loaded(cache)
    declare()
    return ag.of_body(
        _of_packages,
        inputs_x=((4, 2, 512), gb.BF16), inputs_weight=((4, 512), gb.BF16), inputs_state=((SLOTS, 5, 512), gb.BF16),
        inputs_slots=((4,), gb.I32), inputs_accepted=((4,), gb.I32), inputs_decay=((H,), gb.F32), inputs_a=((T, H), gb.BF16),
        inputs_b=((T, H), gb.BF16), inputs_delta=((SLOTS, H, W, W), gb.F32), inputs_norm=((W,), gb.F32),
    )[0]  # fmt: skip


def _of_packages(x, weight, state, slots, accepted, decay, a, b, delta, norm):
    functions = torch.ops.npucompile_packages
    heads = functions.causal_conv1d_update(x, weight, state, slots, accepted).view(T, H, W)
    g, beta = functions.fused_gdn_gating(decay, a, b, decay)
    out = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(
        heads, heads, heads, delta, beta=beta, scale=1.0, actual_seq_lengths=accepted, ssm_state_indices=a[:, 0].to(gb.I32), g=g
    )
    return (functions.rms_norm_gated(out.reshape(T * H, W), norm, heads.reshape(T * H, W), 1e-6),)


def edited(acl_file: AclFile, edit: Callable[[dict[str, Node]], None]) -> AclFile:
    """The file after an edit of its graph, which is told the first node of each operator by its name without namespace and overload."""
    graph = graph_io.decode(acl_file.graph, graph_io.NamedOperator)
    first: dict[str, Node] = {}
    for node in graph.graph.nodes:
        name = (
            str(node.meta.get("leaf", ""))
            if node.op == "placeholder"
            else str(node.target).split(".")[1]
            if "." in str(node.target)
            else ""
        )
        first.setdefault(name, node)
    edit(first)
    return replace(acl_file, graph=graph_io.encode(graph))


def of_type(node: Node, dtype: torch.dtype, *shape: int) -> None:
    """Declares a node's value anew."""
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
