"""Experts in int4 on other devices as one operation: tokens sent there, both products, and their weighted sum sent back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..ordering import after
from ..primitive import Cost, Primitive, nbytes
from ..types import FUSED_EXPERTS, WORLD
from .grouped_experts import experts_cost
from .moe_exchange import (
    Dispatched,
    MoeCombine,
    MoeDispatch,
    moe_combine_of_group,
    moe_combine_reference,
    moe_dispatch_of_group,
    moe_dispatch_reference,
    rows_at_most,
)
from .quant_experts import ExpertsW4A8, grouped_experts_w4a8_reference, grouped_experts_w4a8_static


class FusedExpertsW4A8(NamedTuple):
    """Operands of `fused_experts_w4a8`: those of `moe_dispatch`, `grouped_experts_w4a8` and `moe_combine` that are no result of another."""

    x: Tensor  # [t, M]
    ids: Tensor  # [t, X] int32 in [0, experts), no expert twice in a row
    weights: Tensor  # [t, X] f32
    earlier: Tensor  # [_, M], result of the exchange before this one; x where there is none
    gate_up: Tensor  # [E, M, 2F/8] int32, gate then up
    gate_up_scale: Tensor  # [E, 1, 2F] int64
    gate_up_assist: Tensor  # [E, 2F] f32
    down: Tensor  # [E, F, M/8] int32
    down_scale: Tensor  # [E, 1, M] int64
    down_assist: Tensor  # [E, M] f32
    rank: Tensor  # [1] int32, this device's index in the group; experts rank*E .. rank*E+E-1 are its own
    experts: int  # of all devices
    group: str  # the group's name
    ranks: int  # devices in the group; divides experts


fused_experts_w4a8 = Primitive(
    "fused_experts_w4a8",
    FusedExpertsW4A8,
    factors="_ _, _ _, _ _, _ _, _ _ _, _ _ _, _ _, _ _ _, _ _ _, _ _, _ -> _ _",
    like="x",
)

# What the kernel of vllm-ascend takes (vllm-project/vllm-ascend@182b75e, csrc/mc2/dispatch_ffn_combine_w4_a8): its host code checks none.
FEWEST_TOKENS = 24
"""Tokens of a device. With fewer than it has matrix cores the sum over choices divides by zero (op_kernel/unpermute/
moe_token_unpermute_tiling.h: tokens / cores, then by that); pull requests 9983 and 9992 report wrong logits of such steps."""

MOST_RANKS = 32
"""Devices of its group (MAX_RANK_SIZE in op_kernel/utils/hccl_shmem.hpp, and the stack's own guard)."""

MOST_WIDTHS = (10752, 7168)
"""M and 2F that 192 KiB of a vector core's memory hold: 18 bytes a value in the sum over choices, 27 in the activation."""


def takes(M: int, F: int, ranks: int) -> bool:
    """Whether the kernel takes experts of these widths on so many devices.

    Its first product writes rows at a distance of M, so that 2F may not be more; weights are in NZ alone, in tiles of 16 by 64 int4.
    """
    fits = min(M, MOST_WIDTHS[1]) >= 2 * F and MOST_WIDTHS[0] >= M
    return 1 < ranks <= MOST_RANKS and fits and M % 64 == 0 and F % 32 == 0


def window_bytes(tokens: int, M: int, choices: int) -> int:
    """HCCL_BUFFSIZE that the kernel needs: a third for int8 rows with 512 bytes behind each, 3 MiB of counts, the rest for results.

    PeermemInfo of op_kernel/dispatch_ffn_combine_w4_a8_kernel.hpp, with the 10 MiB to spare that the W8A8 kernel's tiling asks for.
    """
    return 3 * tokens * choices * (M + 512) + 10 * 2**20


def workspace_bytes(tokens: int, M: int, F: int, choices: int, experts: int, ranks: int) -> int:
    """Workspace of the kernel: results of products as two halves in float16, rows in int4, counts (op_host/*_w4_a8_tiling.cpp)."""
    rows, local = rows_at_most(tokens, choices, experts, ranks), experts // ranks
    each = 2 * 4 + 2 * 2 * max(2 * F, M) + max(M, F)
    return 16 * 2**20 + rows * each + 4 * (-(-tokens // 256) * 256 * choices + 2 * ranks * ranks * local + 16 * ranks)


def _dispatch(args: FusedExpertsW4A8) -> MoeDispatch:
    return MoeDispatch(args.x, args.ids, args.earlier, args.rank, args.experts, args.group, args.ranks, True)


def _products(args: FusedExpertsW4A8, sent: Dispatched) -> ExpertsW4A8:
    return ExpertsW4A8(*sent[:3], *args[4:10], args.x.dtype)


def _combine(args: FusedExpertsW4A8, sent: Dispatched, rows: Tensor) -> MoeCombine:
    added = torch.zeros_like(args.x)
    return MoeCombine(rows, args.ids, args.weights, *sent[3:], added, args.rank, args.experts, args.group, args.ranks, rows, False)


def _alone(args: FusedExpertsW4A8, products: Callable[[ExpertsW4A8], Tensor]) -> Tensor:
    sent = moe_dispatch_reference(_dispatch(args))
    return moe_combine_reference(_combine(args, sent, products(_products(args, sent))))


@fused_experts_w4a8.reference
def fused_experts_w4a8_reference(args: FusedExpertsW4A8) -> Tensor:
    """`moe_dispatch` of rows in int8, `grouped_experts_w4a8` and `moe_combine`; all devices of a group call it at once.

    Returns:
        [t, M], dtype of x.
    """
    return _alone(args, grouped_experts_w4a8_reference)


@fused_experts_w4a8.lowering("inductor")
def fused_experts_w4a8_static(args: FusedExpertsW4A8) -> Tensor:
    """As the reference, with static shapes."""
    return _alone(args, grouped_experts_w4a8_static)


@fused_experts_w4a8.group_reference
def fused_experts_of_group(calls: list[FusedExpertsW4A8]) -> list[Tensor]:
    """Every member's result, from every member's operands in the order of their ranks; nothing is sent."""
    sent = moe_dispatch_of_group([_dispatch(args) for args in calls])
    rows = [grouped_experts_w4a8_reference(_products(args, received)) for args, received in zip(calls, sent, strict=True)]
    return moe_combine_of_group([_combine(*member) for member in zip(calls, sent, rows, strict=True)])


@fused_experts_w4a8.lowering("npu", needs=("aclgraph", "ascend910_93", "vllm-ascend"))
def fused_experts_w4a8_mc2(args: FusedExpertsW4A8) -> Tensor:
    """One kernel. It drops rows beyond `max_output_size` without a word, so it gets room for all that one device can receive."""
    if args.group != WORLD:
        raise PrimitiveError(f"fused experts are over group {args.group!r}; on NPUs legal is {WORLD!r}: experts split over all ranks")
    x = args.x if args.earlier is args.x else after(args.x, args.earlier)
    out: Tensor = torch.ops.npucompile_packages.dispatch_ffn_combine_w4a8(
        x,
        args.gate_up,
        args.down,
        args.ids,
        args.gate_up_scale.flatten(1),
        args.down_scale.flatten(1),
        args.gate_up_assist,
        args.down_assist,
        args.weights,
        # Rows of other operators in its window are counts that it has not waited for: a communicator of its own.
        FUSED_EXPERTS,
        args.ranks,
        rows_at_most(args.ids.shape[0], args.ids.shape[1], args.experts, args.ranks),
    )
    return out


@fused_experts_w4a8.cost
def _cost(args: FusedExpertsW4A8) -> Cost:
    tokens, choices = args.ids.shape
    rows = args.x.new_empty(rows_at_most(tokens, choices, args.experts, args.ranks), args.x.shape[1], device="meta", dtype=torch.int8)
    products = experts_cost(rows, 0, list(args[4:10]))
    read = products.read_bytes - nbytes(rows) + nbytes(args.x, args.ids, args.weights)
    return Cost(products.flops + 3 * args.x.numel() + 2 * rows.numel(), read, nbytes(args.x))
