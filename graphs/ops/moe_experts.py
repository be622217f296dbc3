"""Mixture of experts: the weighted sum of each token's chosen experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import products
from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive, nbytes
from .grouped_experts import GroupedExperts, grouped_experts_ge
from .moe_sort import MoeSort, MoeUnsort, moe_sort_ge, moe_unsort_ge


class MoeExperts(NamedTuple):
    """Operands of `moe_experts`."""

    x: Tensor  # [T, M]
    weights: Tensor  # [T, X] f32
    ids: Tensor  # [T, X] int32; a choice outside [0, E) is another device's expert and adds nothing
    gate_up: Tensor  # [E, 2, F, M], gate then up
    down: Tensor  # [E, M, F]


moe_experts = Primitive("moe_experts", MoeExperts, factors="_ _, _ _, _ _, _ _ f _, _ _ f -> _ _; sum f", like="x")


@moe_experts.reference
def moe_experts_reference(args: MoeExperts) -> Tensor:
    """`sum_x weights[t, x] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))` with e = ids[t, x]; the sum in f32.

    Returns:
        [T, M], dtype of x.
    """
    x, weights, ids, gate_up, down = args
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (widen, narrow) in enumerate(zip(gate_up.flatten(1, 2).unbind(), down.unbind(), strict=True)):
        rows, choice = torch.nonzero(ids == expert, as_tuple=True)
        if rows.numel():
            gate, up = products.linear(x.index_select(0, rows), widen).chunk(2, -1)
            out = products.linear(torch.nn.functional.silu(gate) * up, narrow)
            total = total.index_add(0, rows, out.float() * weights[rows, choice].float()[:, None])
    return total.to(x.dtype)


_plain = Native("npuc_experts", moe_experts.schema, moe_experts.rule("abstract")).op


def moe_experts_static(args: MoeExperts) -> Tensor:
    """The same sum with static shapes.

    Few choices: each gathers its expert's matrices. Many: every expert runs on every token, and the weights of those not
    chosen are zero; the matrices are then read once, which they would be anyway.
    """
    x, weights, ids, gate_up, down = args
    experts, choices = gate_up.shape[0], ids.numel()
    if 2 * choices <= experts:
        local = (ids >= 0) & (ids < experts)
        flat = torch.where(local, ids, 0).flatten()
        rows = x[:, None, :].expand(-1, ids.shape[1], -1).reshape(choices, -1, 1)
        gate, up = torch.bmm(gate_up.flatten(1, 2).index_select(0, flat), rows).squeeze(-1).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out = torch.bmm(down.index_select(0, flat), hidden[:, :, None]).view(*ids.shape, -1)
        return torch.where(local[:, :, None], out.float() * weights.float()[:, :, None], 0).sum(1).to(x.dtype)
    gate, up = torch.nn.functional.linear(x, gate_up.flatten(0, 2)).view(x.shape[0], experts, 2, -1).unbind(2)
    hidden = (torch.nn.functional.silu(gate) * up).transpose(0, 1)
    out = torch.bmm(hidden, down.transpose(1, 2))
    chosen = ids[:, :, None] == torch.arange(experts, dtype=torch.int32, device=ids.device)
    share = torch.where(chosen, weights.float()[:, :, None], 0.0).sum(1)
    return (out.float() * share.t()[:, :, None]).sum(0).to(x.dtype)


_panels = Native(
    "npuc_experts_bf16",
    moe_experts.schema,
    moe_experts.rule("abstract"),
    Packed((3, 4), "bf16", lambda *args: moe_experts_static(MoeExperts(*args))),
).op


@moe_experts.lowering("inductor")
def moe_experts_on_cpu(args: MoeExperts) -> Tensor:
    """Kernels for any number of rows that read the chosen experts alone: in float32 (lowering/cpp/experts.cpp), and in bfloat16 with
    weights that were packed when they were loaded (lowering/cpp/experts_bf16.cpp)."""
    x, weights, _, gate_up, down = args
    if weights.dtype == torch.float32 and {x.dtype, gate_up.dtype, down.dtype} == {torch.bfloat16}:
        packed: Tensor = _panels(*args)
        return packed
    if {x.dtype, weights.dtype, gate_up.dtype, down.dtype} == {torch.float32}:
        plain: Tensor = _plain(*args)
        return plain
    return moe_experts_static(args)


@moe_experts.lowering("npu")
def moe_experts_ge(args: MoeExperts) -> Tensor:
    """Rows sorted by expert, two grouped products, rows put back; one expert more stands for those of other devices.

    The kernels want [E, M, 2F] and [E, F, M] weights, so these are transposed at each call: a program for the device stores them so
    and uses the primitives this one is made of.
    """
    x, weights, ids, gate_up, down = args
    experts = gate_up.shape[0]
    shifted = ids.masked_fill((ids < 0) | (ids >= experts), experts)
    rows, _, counts, index = moe_sort_ge(MoeSort(x, shifted, experts, experts + 1, False))
    out = grouped_experts_ge(GroupedExperts(rows, counts, gate_up.flatten(1, 2).transpose(1, 2), down.transpose(1, 2)))
    return moe_unsort_ge(MoeUnsort(out, weights, index))


@moe_experts.cost
def _cost(args: MoeExperts) -> Cost:
    x, weights, ids, gate_up, down = args
    expert = gate_up[0].numel() + down[0].numel()
    touched = min(gate_up.shape[0], ids.numel())
    return Cost(2 * ids.numel() * expert, nbytes(x, weights, ids) + touched * expert * x.dtype.itemsize, nbytes(x))
