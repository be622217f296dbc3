"""A GE graph in which every operator is legal: attention over pages, the delta rule, and int8 experts on other devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.ge_file import GeFile, messages, parse
from npucompile.lowering.ascend.legality.check import Violation, examine
from npucompile.lowering.ascend.link import link
from npucompile.lowering.platform import Platform

from . import ge_bodies as gb

npu, c10 = torch.ops.npu, torch.ops._c10d_functional
B, Q, H, G, D, P, PAGES, M, EXPERTS, RANKS, CHOSEN, F = 4, 2, 4, 2, 256, 128, 8, 1024, 32, 4, 4, 128
A3 = Platform("ascend910_93", "9.1")
SHAPES: dict[str, gb.Shape] = {
    "params.q": ((H * D, M), gb.BF16),
    "params.kv": ((2 * G * D, M), gb.BF16),
    "params.router": ((EXPERTS, M), gb.F32),
    "params.up": ((EXPERTS // RANKS, M, 2 * F), torch.int8),
    "params.up_scale": ((EXPERTS // RANKS, 2 * F), gb.F32),
    "params.down": ((EXPERTS // RANKS, F, M), torch.int8),
    "params.down_scale": ((EXPERTS // RANKS, M), gb.F32),
    "state.k": ((PAGES, P, G, D), gb.BF16),
    "state.v": ((PAGES, P, G, D), gb.BF16),
    "state.delta": ((9, H, 64, 64), gb.BF16),
    "inputs.x": ((B * Q, M), gb.BF16),
    "inputs.slots": ((B * Q,), gb.I32),
    "inputs.pages": ((B, 2), gb.I32),
    "inputs.lens": ((B,), gb.I64),
    "inputs.mask": ((2048, 2048), gb.BOOL),
    "inputs.gate": ((B * Q, H), gb.F32),
    "inputs.write": ((B * Q,), gb.I32),
    "inputs.counts": ((B,), gb.I32),
}


def step(q, kv, router, up, up_scale, down, down_scale, k_pool, v_pool, delta, x, slots, pages, lens, mask, gate, write, counts):
    """Attention over pages, the delta rule, and int8 experts on other devices, in the forms that CANN documents."""
    query = npu.npu_linear(x, q)
    key, value = npu.npu_linear(x, kv).view(B * Q, 2 * G, D).split(G, 1)
    k, v = npu.npu_scatter_pa_kv_cache_functional(key.contiguous(), value.contiguous(), k_pool, v_pool, slots, cache_mode="Norm")
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        query.view(B, Q, H * D), k.view(PAGES, P, G * D), v.view(PAGES, P, G * D), atten_mask=mask, block_table=pages,
        actual_seq_lengths_kv=lens + 1, num_heads=H, num_key_value_heads=G, scale=D**-0.5, input_layout="BSH", sparse_mode=3, block_size=P,
    )  # fmt: skip
    heads = query.view(B * Q, H, D)[..., :64].contiguous()
    ruled, new = npu.npu_recurrent_gated_delta_rule_functional(
        heads, heads, heads, delta, beta=gate.to(gb.BF16), scale=1.0, actual_seq_lengths=counts, ssm_state_indices=write, g=gate
    )
    mixed = c10.wait_tensor(c10.all_reduce(out.view(B * Q, H * D) + ruled.view(B * Q, -1).repeat(1, 4), "sum", "tp"))
    weights, ids, _ = npu.npu_moe_gating_top_k(npu.npu_linear(mixed.float(), router), CHOSEN)
    rows, scale, assist, received, sent, _, _ = npu.npu_moe_distribute_dispatch_v2(
        mixed, ids, "dispatch", RANKS, 0, EXPERTS, quant_mode=2, expert_token_nums_type=1
    )
    hidden, hidden_scale = npu.npu_grouped_matmul_swiglu_quant_v2(rows, [up], [up_scale], scale, received, group_list_type=1)
    done = npu.npu_grouped_matmul(
        [hidden], [down], scale=[down_scale], per_token_scale=[hidden_scale], group_list=received, output_dtype=gb.BF16,
        split_item=3, group_type=0, group_list_type=1,
    )[0]  # fmt: skip
    y = npu.npu_moe_distribute_combine_v2(done, ids, assist, sent, weights, "dispatch", RANKS, 0, EXPERTS)
    k_pool.copy_(k)
    v_pool.copy_(v)
    delta.copy_(new)
    return (y,)


def legal(cache: Path) -> GeFile:
    """The graph's file, with tiling on the device, which lengths that the step computes need."""
    ta = gb.loaded(cache)
    main = gb.Main()
    operands = [main.operand(name, shape) for name, shape in SHAPES.items()]
    main.body("step", step, list(SHAPES.values()))
    ge_file = link(*main.done(*main.call("step", *operands)), ta)
    return replace(ge_file, options={**ge_file.options, "ge.tiling_schedule_optimize": "1"})


def edited(ge_file: GeFile, edit: Callable[[dict[str, Any]], None]) -> GeFile:
    """The GE file after `edit(first operator of each type)`."""
    model = parse(ge_file.graph)
    first: dict[str, Any] = {}
    for op in model.graph[0].op:
        first.setdefault(op.type, op)
    edit(first)
    return replace(ge_file, graph=model.SerializeToString(deterministic=True))


def declare(op: Any, port: int, dtype: str, sizes: list[int]) -> None:
    """Another type of an operator's result."""
    op.output_desc[port].dtype = messages().DataType.Value(dtype)
    op.output_desc[port].shape.dim[:] = sizes
    if min(sizes) < 0:
        # Only a converter that leaves a size open writes such a graph; it declares no traced sizes then.
        del op.output_desc[port].attr["_meta"]
    if "_meta" in op.output_desc[port].attr:
        short = {"DT_FLOAT": "f32", "DT_BF16": "bf16", "DT_INT32": "i32", "DT_INT8": "i8", "DT_INT64": "i64"}[dtype]
        op.output_desc[port].attr["_meta"].s = f"{short}[{','.join(map(str, sizes))}]".encode()


def violations(graph: GeFile | AclFile, platform: Platform = A3, **facts: Any) -> list[Violation]:
    """What CANN would refuse of a graph."""
    return examine(graph, platform, **facts).violations
