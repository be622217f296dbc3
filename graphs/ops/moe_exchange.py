"""Expert parallelism: tokens sent to the devices of their experts, and the experts' rows sent back."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..ordering import after
from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows, rounded_in_blocks
from ..types import DISPATCH, WORLD
from .moe_sort import grouped


class MoeDispatch(NamedTuple):
    """Operands of `moe_dispatch`."""

    x: Tensor  # [t, M]
    ids: Tensor  # [t, X] int32 in [0, experts), no expert twice in a row
    earlier: Tensor  # [_, M], rows of the exchange before this one; x where there is none
    rank: Tensor  # [1] int32, this device's index in the group; experts rank*E .. rank*E+E-1 are its own
    experts: int  # of all devices
    group: str  # the group's name
    ranks: int  # devices in the group; divides experts
    quantise: bool  # round each row to int8, before it is sent


class MoeCombine(NamedTuple):
    """Operands of `moe_combine`; `rank`, `experts`, `group` and `ranks` are those of `moe_dispatch`."""

    rows: Tensor  # [R, M], in the order of `moe_dispatch`
    ids: Tensor  # [t, X] int32, what `moe_dispatch` was given
    weights: Tensor  # [t, X] f32
    assist: Tensor  # [R*128] int32, from `moe_dispatch`
    recv_counts: Tensor  # [experts] int32, from `moe_dispatch`
    shared: Tensor  # [t, M], added to the result: the output of a shared expert; [0, M] where there is none
    rank: Tensor
    experts: int
    group: str
    ranks: int
    earlier: Tensor  # [_, M], rows of the dispatch that comes between; `rows` where none does
    quantise: bool  # rows travel as int8, see `quantise.rounded_in_blocks`


moe_dispatch = Primitive("moe_dispatch", MoeDispatch, factors="_ _, _ _, _ _, _ -> _ _, _, _, _, _", travels=True)

moe_combine = Primitive("moe_combine", MoeCombine, factors="_ _, _ _, _ _, _, _, _ _, _, _ _ -> _ _", travels=True)

ASSIST = 128
"""int32 numbers the kernels keep for each row; the reference uses the first three: source rank, token there, choice there."""

Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def rows_at_most(tokens: int, choices: int, experts: int, ranks: int) -> int:
    """R, the rows that one device can get: each token, of any device, comes once for each expert here at most."""
    return tokens * ranks * min(choices, experts // ranks)


@moe_dispatch.abstract
def _dispatch_abstract(args: MoeDispatch) -> Dispatched:
    x, device = args.x, args.x.device
    R = rows_at_most(args.ids.shape[0], args.ids.shape[1], args.experts, args.ranks)
    return (
        torch.empty((R, x.shape[1]), dtype=torch.int8 if args.quantise else x.dtype, device=device),
        torch.empty(R, dtype=torch.float32, device=device),
        torch.empty(args.experts // args.ranks, dtype=torch.int64, device=device),
        torch.empty(R * ASSIST, dtype=torch.int32, device=device),
        torch.empty(args.experts, dtype=torch.int32, device=device),
    )


@moe_dispatch.reference
def moe_dispatch_reference(args: MoeDispatch) -> Dispatched:
    """Sends each token to the devices of its experts; all devices of a group call it at once, each with as many tokens.

    Returns:
        rows [R, M] (dtype of x, or int8) grouped by expert, with R as `rows_at_most` says; their scales [R] f32 (ones where not
        quantised, unspecified on a device); rows of each expert here [E] int64; and two records for `moe_combine` alone,
        [R*128] int32 and [experts] int32. Rows from the sum of the counts on are unspecified; here they are zero.
    """
    rows, scale = (_gather(part, args.ranks, args.group) for part in _to_send(args))
    return _received(rows, scale, _gather(args.ids, args.ranks, args.group), args)


def _to_send(args: MoeDispatch) -> tuple[Tensor, Tensor]:
    x = args.x
    return quantise_rows(x) if args.quantise else (x, torch.ones(x.shape[0], dtype=torch.float32, device=x.device))


def _gather(part: Tensor, ranks: int, group: str) -> Tensor:
    if ranks == 1:
        return part
    collectives = torch.ops._c10d_functional
    whole: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(part.contiguous(), ranks, group))
    return whole


def _received(rows: Tensor, scale: Tensor, ids: Tensor, args: MoeDispatch) -> Dispatched:
    """What one device gets of all devices' rows [ranks*t, M], scales [ranks*t] and choices [ranks*t, X]."""
    choices, local_experts = ids.shape[1], args.experts // args.ranks
    tokens = ids.shape[0] // args.ranks
    R = rows_at_most(tokens, choices, args.experts, args.ranks)
    flat = (ids - args.rank * local_experts).flatten()
    order, counts = grouped(flat, local_experts)
    order = order[:R]
    filled = torch.arange(R, device=rows.device) < counts.sum()
    token, choice = order // choices, order % choices
    source = torch.stack([token // tokens, token % tokens, choice], 1)
    assist = torch.nn.functional.pad(torch.where(filled[:, None], source, 0), (0, ASSIST - 3)).flatten().to(torch.int32)
    local_rows = torch.where(filled[:, None], rows.index_select(0, token), 0)
    local_scale = torch.where(filled, scale.index_select(0, token), 0)
    return local_rows, local_scale, counts, assist, _prefixes(flat, local_experts, args.ranks)


def _prefixes(flat: Tensor, local_experts: int, ranks: int) -> Tensor:
    """[local_experts * ranks] int32: how many rows there are up to each expert's rows from each rank, this one included."""
    own = torch.arange(local_experts, dtype=flat.dtype, device=flat.device)
    return (flat.view(1, ranks, -1) == own[:, None, None]).sum(2).flatten().cumsum(0).to(torch.int32)


@moe_dispatch.group_reference
def moe_dispatch_of_group(calls: list[MoeDispatch]) -> list[Dispatched]:
    """Every member's results, from every member's operands in the order of their ranks; nothing is sent."""
    rows, scale = (torch.cat(parts) for parts in zip(*map(_to_send, calls), strict=True))
    ids = torch.cat([args.ids for args in calls])
    return [_received(rows, scale, ids, args) for args in calls]


@moe_dispatch.lowering("npu")
def moe_dispatch_ge(args: MoeDispatch) -> Dispatched:
    """One kernel. Its rank is an attribute, and one graph serves all ranks: 0 here, the runtime writes each device's own."""
    return _dispatch(args, "", 0)


@moe_dispatch.lowering("npu", needs=("ascend910_93", "cann>=9.0"))
def moe_dispatch_full_mesh(args: MoeDispatch) -> Dispatched:
    """As `moe_dispatch_ge`, by the algorithm that `_algorithm` chooses."""
    return _dispatch(args, _algorithm(args.ids), _NO_TENSOR_PARALLELISM)


def _dispatch(args: MoeDispatch, algorithm: str, tp_world_size: int) -> Dispatched:
    mode = 2 if args.quantise else 0
    rows, scale, assist, counts, recv_counts, _, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        _ordered(args.x, args.earlier),
        args.ids,
        _own_group(args.group),
        args.ranks,
        0,
        args.experts,
        quant_mode=mode,
        expert_token_nums_type=1,
        tp_world_size=tp_world_size,
        comm_alg=algorithm,
    )
    return rows, scale, counts, assist, recv_counts


def _ordered(rows: Tensor, earlier: Tensor) -> Tensor:
    return rows if earlier is rows else after(rows, earlier)


def _algorithm(ids: Tensor) -> str:
    """`comm_alg` on an Atlas A3, the same in dispatch and combine.

    The second full-mesh algorithm, which public recipes ask for, takes at most 256 tokens and 12 choices, the first, "", 512 and 16
    (npu_moe_distribute_dispatch_v2 in the documentation of Ascend/op-plugin, 04f7867, which does not ask the layers of a network to agree
    on it); CANN 8.5 documents none.
    """
    return "fullmesh_v2" if ids.shape[0] <= 256 and ids.shape[1] <= 12 else ""


_NO_TENSOR_PARALLELISM = 1
"""`tp_world_size` where graphs name algorithms. 0 means the same, but a full mesh takes effect with 1 alone, and the layers of a network
must agree, whichever algorithm each uses."""


def _own_group(group: str) -> str:
    """The kernels allow no other operator in their communicator, so they name a group of their own with the same ranks."""
    if group != WORLD:
        raise PrimitiveError(f"expert dispatch is over group {group!r}; on NPUs legal is {WORLD!r}: experts split over all ranks")
    return DISPATCH


@moe_dispatch.cost
def _dispatch_cost(args: MoeDispatch) -> Cost:
    results = _dispatch_abstract(args._replace(x=args.x.to("meta")))
    return Cost(3 * args.x.numel() * args.quantise, nbytes(args.x, args.ids), nbytes(*results))


@moe_combine.abstract
def _combine_abstract(args: MoeCombine) -> Tensor:
    return torch.empty((args.ids.shape[0], args.rows.shape[1]), dtype=args.rows.dtype, device=args.rows.device)


@moe_combine.reference
def moe_combine_reference(args: MoeCombine) -> Tensor:
    """Sends rows back to their tokens' devices, sums them by weight and adds `shared`, in f32; all devices of a group call it at once.

    Returns:
        [t, M], dtype of rows.
    """
    total = _spread(args, _gather(args.weights, args.ranks, args.group))
    if args.ranks > 1:
        collectives = torch.ops._c10d_functional
        total = collectives.wait_tensor(collectives.reduce_scatter_tensor(total, "sum", args.ranks, args.group))
    return _plus_shared(total, args)


def _plus_shared(total: Tensor, args: MoeCombine) -> Tensor:
    return (total + args.shared.float() if len(args.shared) else total).to(args.rows.dtype)


def _spread(args: MoeCombine, weights: Tensor) -> Tensor:
    """One device's share of every token's sum: [ranks*t, M] f32, from the weights [ranks*t, X] of all tokens."""
    rows, tokens = rounded_in_blocks(args.rows) if args.quantise else args.rows, args.ids.shape[0]
    R, M = rows.shape
    rank, token, choice = args.assist.view(R, ASSIST)[:, :3].long().unbind(1)
    filled = torch.arange(R, device=rows.device) < args.recv_counts[-1]
    flat = rank * tokens + token
    share = rows.float() * weights.float()[flat, choice][:, None]
    empty = torch.zeros(weights.shape[0], M, dtype=torch.float32, device=rows.device)
    return empty.index_add(0, flat, torch.where(filled[:, None], share, 0))


@moe_combine.group_reference
def moe_combine_of_group(calls: list[MoeCombine]) -> list[Tensor]:
    """Every member's result, from every member's operands in the order of their ranks; nothing is sent."""
    weights = torch.cat([args.weights for args in calls])
    totals = torch.stack([_spread(args, weights) for args in calls]).sum(0).chunk(len(calls))
    return [_plus_shared(total, args) for total, args in zip(totals, calls, strict=True)]


@moe_combine.lowering("npu")
def moe_combine_ge(args: MoeCombine) -> Tensor:
    """One kernel, its rank attribute as in `moe_dispatch_ge`, and a sum: an Atlas A2 takes no `shared_expert_x`.

    Raises:
        PrimitiveError: rows are to travel as int8.
    """
    if args.quantise:
        raise PrimitiveError("moe_combine is to send int8; legal is that on an Atlas A3 (ascend910_93), here floats")
    out = _combine(args, "", 0, None)
    return out + args.shared if len(args.shared) else out


@moe_combine.lowering("npu", needs=("ascend910_93",))
def moe_combine_shared(args: MoeCombine) -> Tensor:
    """One kernel, which adds the shared expert's output (aclnnMoeDistributeCombineV2 of hicann/ops-transformer, 8.5.0.alpha001)."""
    return _combine(args, "", 0, _shared(args))


@moe_combine.lowering("npu", needs=("ascend910_93", "cann>=9.0"))
def moe_combine_full_mesh(args: MoeCombine) -> Tensor:
    """As `moe_combine_shared`, by the algorithm that dispatched."""
    return _combine(args, _algorithm(args.ids), _NO_TENSOR_PARALLELISM, _shared(args))


def _shared(args: MoeCombine) -> Tensor | None:
    return args.shared if len(args.shared) else None


def _combine(args: MoeCombine, algorithm: str, tp_world_size: int, shared: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        _ordered(args.rows, args.earlier),
        args.ids,
        args.assist,
        args.recv_counts,
        args.weights,
        _own_group(args.group),
        args.ranks,
        0,
        args.experts,
        shared_expert_x=shared,
        tp_world_size=tp_world_size,
        comm_alg=algorithm,
        **({"comm_quant_mode": 2} if args.quantise else {}),
    )
    return out


@moe_combine.cost
def _combine_cost(args: MoeCombine) -> Cost:
    rows, ids, weights, assist, recv_counts, shared, *_ = args
    return Cost(
        2 * rows.numel() + shared.numel(),
        nbytes(rows, ids, weights, assist, recv_counts, shared),
        ids.shape[0] * rows.shape[1] * rows.dtype.itemsize,
    )
