"""CPU kernel of experts that are one operator: the calls of all members of a group -> the result of each member.

Semantics and restrictions: vllm-project/vllm-ascend@182b75e, csrc/mc2/dispatch_ffn_combine_w4_a8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.ops.fused_experts import FEWEST_TOKENS, MOST_RANKS, takes
from ....graphs.types import FUSED_EXPERTS
from ..packages import NAMESPACE
from . import work
from .checks import FLOATS, float_scale, quantise_rows, require, require_shape, unpack_int4
from .node import Node
from .record import Arguments, NpuOperator, TorchForm

OP = "dispatch_ffn_combine_w4a8"


def dispatch_ffn_combine_w4a8(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """out[t] = sum over choices of probs[t, x] * expert(x[t]), each expert on the member that owns it.

    Each call: (x [T, M], weight1 int32 [E, M, 2F/8], weight2 int32 [E, F, M/8], expert_idx int32 [T, X], scale1 int64 [E, 2F], scale2 int64
    [E, M], bias1 f32 [E, 2F], bias2 f32 [E, M], probs f32 [T, X], group, size, max_output_size). Rows are rounded to int8 before they are
    sent and between the products, whose halves are float16 unless x is float32; what an expert returns is rounded to the dtype of x before
    the sum.

    Returns:
        [T, M] like x for each of `members`, or of all. A member that receives more than max_output_size rows leaves out the last ones, as
        the kernel does, which here is NaN.
    """
    for rank, (args, _) in enumerate(calls):
        _check(args, rank, len(calls))
    sent = [quantise_rows(args[0].float()) for args, _ in calls]
    returned = [torch.full((*args[3].shape, args[0].shape[1]), float("nan")) for args, _ in calls]
    for rank, (args, _) in enumerate(calls):
        _compute(calls, sent, returned, rank, args[1].shape[0])
    wanted = range(len(calls)) if members is None else members
    return [_summed(calls[rank][0], returned[rank]) for rank in wanted]


def _check(args: tuple[Any, ...], rank: int, members: int) -> None:
    x, weight1, weight2, ids, scale1, scale2, bias1, bias2, probs, _, size, most = args
    T, M = require(OP, "x", x, FLOATS, (2,)).shape
    E, F = require(OP, "weight2", weight2, (torch.int32,), (3,)).shape[:2]
    require_shape(OP, "weight1", require(OP, "weight1", weight1, (torch.int32,), (3,)), (E, M, 2 * F // 8))
    require_shape(OP, "weight2", weight2, (E, F, M // 8))
    for name, value, dtype, shape in (
        ("scale1", scale1, torch.int64, (E, 2 * F)),
        ("scale2", scale2, torch.int64, (E, M)),
        ("bias1", bias1, torch.float32, (E, 2 * F)),
        ("bias2", bias2, torch.float32, (E, M)),
        ("probs", probs, torch.float32, ids.shape),
    ):
        require_shape(OP, name, require(OP, name, value, (dtype,), (2,)), shape)
    require_shape(OP, "expert_idx", require(OP, "expert_idx", ids, (torch.int32,), (2,)), (T, ids.shape[1]))
    if size != members or most <= 0:
        raise LoweringError(f"{OP}: {size} members and {most} rows, the group of this mesh has {members}; legal are these, and rows")
    if not FEWEST_TOKENS <= T:
        raise LoweringError(f"{OP}: {T} tokens; legal are at least {FEWEST_TOKENS}, a token for each matrix core")
    if size > MOST_RANKS or (size > 1 and not takes(M, F, size)):
        raise LoweringError(
            f"{OP}: widths {M} and 2 * {F} on {size} members; legal are 2F up to M, multiples of 64, and {MOST_RANKS} members"
        )
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < E * size):
        raise LoweringError(f"{OP}: member {rank} has expert_idx {ids.tolist()}; legal are 0 to {E * size - 1}")


def _compute(
    calls: list[Arguments], sent: list[tuple[torch.Tensor, torch.Tensor]], returned: list[torch.Tensor], rank: int, local: int
) -> None:
    """Runs the experts of a member on the rows of all, in the order of experts and then of members."""
    x, weight1, weight2, _, scale1, scale2, bias1, bias2, _, _, _, room = calls[rank][0]
    half = torch.float32 if x.dtype == torch.float32 else torch.float16
    for e in range(local):
        picks = []
        for args, _ in calls:
            token, choice = (args[3] == rank * local + e).nonzero(as_tuple=True)
            picks.append((token[:room], choice[:room]))
            room -= len(picks[-1][0])
        rows, scale = (torch.cat([values[i][token] for values, (token, _) in zip(sent, picks, strict=True)]) for i in (0, 1))
        if not len(rows):
            continue
        gate, up = (_product(rows, weight1[e], scale1[e], bias1[e], half) * scale[:, None]).chunk(2, -1)
        hidden, hidden_scale = quantise_rows(torch.nn.functional.silu(gate) * up)
        out = (_product(hidden, weight2[e], scale2[e], bias2[e], half) * hidden_scale[:, None]).to(x.dtype).float()
        for back, pick, part in zip(returned, picks, out.split([len(token) for token, _ in picks]), strict=True):
            back[pick] = part


def _product(rows: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, assist: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """int8 rows [N, K] = 16 * high + low + 8 by int4 [K, n/8]: two products of int4, scaled and rounded, and 8 * sum of the weights."""
    weight, wide = unpack_int4(packed[None])[0].double(), float_scale(scale).double()
    high = rows.double().div(16).floor()
    upper, lower = (((part @ weight) * wide).to(half).float() for part in (high, rows.double() - 16 * high - 8))
    return 16 * upper + lower + assist


def _summed(args: tuple[Any, ...], returned: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = (returned * args[8][..., None]).sum(1).to(args[0].dtype)
    return out


def _fused_work(op: Node, facts: work.Facts) -> tuple[work.Work, ...]:
    """A row a token and chosen expert goes to its expert as int8 and comes back as it was; between them the experts' two products."""
    group, ranks = op.group, op.attributes["ranks"]
    x, ids, first, second = (facts.types[op.tensor(name)] for name in ("x", "expert_idx", "weight1", "weight2"))
    there = ids.elements * x.shape[-1] * (ranks - 1) / ranks * facts.expert_imbalance
    back = there * x.nbytes / max(x.elements, 1)
    local = first.shape[0]
    read = work.experts_read(work.Rows(ids.elements, ids.elements * ranks, local, local * ranks), facts.expert_skew)
    rows = ids.elements * facts.expert_imbalance
    weights = sum(facts.types[op.tensor(name)].nbytes for name in ("weight1", "weight2", "scale1", "scale2", "bias1", "bias2"))
    # int32 hold eight int4.
    per_expert = sum(weight.elements * (8 if weight.dtype == "i32" else 1) for weight in (first, second)) / local
    ops = 2.0 * max(rows, read * work.MATRIX_ROWS / 2) * per_expert
    products = work.Work(hbm_bytes=weights * read / local, int8_ops=ops, vector_ops=6.0 * rows * second.shape[1])
    return (
        work.Work(sent_bytes=there, group=group, exchange="dispatch"),
        products,
        work.Work(sent_bytes=back, group=group, exchange="combine"),
    )


OPERATORS = (
    NpuOperator(
        acl=("dispatch_ffn_combine",),
        torch=(
            TorchForm(
                f"{NAMESPACE}.{OP}.default",
                group_kernel=dispatch_ffn_combine_w4a8,
                group=(9, "group"),
                size=10,
                weights=((1, "weight1"), (2, "weight2")),
                # Weights in NZ alone: aclnn_dispatch_ffn_combine_w4_a8.cpp of vllm-project/vllm-ascend, 182b75e.
                only_nz=torch.int32,
            ),
        ),
        stages=_fused_work,
        collective="fused_experts_w4a8",
        own_group=FUSED_EXPERTS,
        exchange="fused experts",
    ),
)
