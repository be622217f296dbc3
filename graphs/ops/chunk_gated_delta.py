"""Gated delta rule over long rows, in chunks: prefill of a gated DeltaNet layer from its convolution on.

Norms of queries and keys and the gates are part of it, as in other implementations of a chunked rule (`use_qk_l2norm_in_kernel` and
`use_gate_in_kernel` of fla-org/flash-linear-attention): heads are laid out by chunk in one piece, and both gates are one tensor.
"""

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..state_slots import read_states, write_states_npu
from .delta_gates import DeltaGates, delta_gates_reference, delta_gates_vllm
from .delta_products import HIDDEN, chunked_delta
from .gated_delta import per_value_head
from .l2_norm import L2Norm, l2_norm_npu, l2_norm_reference


class ChunkGatedDelta(NamedTuple):
    """Operands of `chunk_gated_delta`; key head j serves value heads j*r .. j*r+r-1, r = H / Hk."""

    qkv: Tensor  # [B, Q, Hk, 2 Dk + r Dv] query, key and values of each key head
    ba: Tensor  # [B, Q, Hk, 2 r] projections of beta, then of the decay; their dtype is the result's
    a_log: Tensor  # [H] f32
    dt_bias: Tensor  # [H] f32
    state: Tensor  # [S, H, Dv, Dk] pool, any float dtype
    read: Tensor  # [B] slot each row starts from; a row with num_computed_tokens == 0 starts from zeros
    write: Tensor  # [B, 1] slot for the state after the last valid token
    num_computed_tokens: Tensor  # [B] tokens before this step
    query_lens: Tensor  # [B] valid tokens in this step
    eps: float  # added to the sum of squares of queries and keys
    chunk: int  # tokens a chunk, a power of two that divides Q


chunk_gated_delta = Primitive(
    "chunk_gated_delta",
    ChunkGatedDelta,
    factors="_ _ h _, _ _ h _, h, h, _ h _ _, _, _ _, _, _ -> _ _ h _, _ h _ _",
    donates=((4, 1),),
)


@chunk_gated_delta.abstract
def _abstract(args: ChunkGatedDelta) -> tuple[Tensor, Tensor]:
    H, Dv, Dk = args.state.shape[1:]
    B, Q, Hk, width = args.qkv.shape
    if width * Hk != 2 * Dk * Hk + Dv * H:
        raise PrimitiveError(
            f"chunk_gated_delta has {width} columns in each of {Hk} key heads and states of {H} heads, {Dv} by {Dk}; legal are "
            f"{2 * Dk + Dv * H // Hk} columns"
        )
    return torch.empty(B, Q, H, Dv, dtype=args.ba.dtype, device=args.qkv.device), torch.empty_like(args.state)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of unit lower-triangular matrices [..., C, C], C a power of two, by merging diagonal blocks.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: at each level T holds the inverses of blocks of size s and
    T @ (L masked to the B blocks) @ T is exactly the missing part. Powers of L - I, the other way that needs no solver,
    lose all f32 digits when keys repeat.
    """
    C = lower.shape[-1]
    row = torch.arange(C, device=lower.device)

    def corners(size: int) -> Tensor:
        block = row // size
        return torch.where((block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1), lower, 0.0)

    inverse = (row[:, None] == row[None, :]).to(lower.dtype) - corners(1)
    size = 2
    while size < C:
        inverse = inverse - inverse @ corners(size) @ inverse
        size *= 2
    return inverse


class Chunks(NamedTuple):
    """The state-free part of the chunked rule (WY form, arXiv:2412.06464) for N chunks of C tokens, all f32.

    With the state S before a chunk and d = u - w S', its outputs are q S' + attn d, and the state after it is decay S + d' k.
    """

    u: Tensor  # [B, H, N, C, Dv]
    w: Tensor  # [B, H, N, C, Dk]
    q: Tensor  # [B, H, N, C, Dk], decayed from the start of the chunk
    k: Tensor  # [B, H, N, C, Dk], decayed to the end of the chunk
    attn: Tensor  # [B, H, N, C, C]
    decay: Tensor  # [B, H, N, 1, 1]


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Chunks:
    """All chunks at once; Q is a multiple of C, shapes as in `_recurrent`."""
    row = torch.arange(chunk, device=q.device)
    visible, before = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    qc, kc, vc, bc = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, beta[..., None]))
    total = g.unflatten(2, (-1, chunk)).cumsum(-1)
    fade = torch.where(visible, (total[..., :, None] - total[..., None, :]).clamp(max=0.0).exp(), 0.0)
    keys = kc.transpose(-1, -2)
    identity = (row[:, None] == row[None, :]).to(q.dtype)
    solve = _unit_lower_inverse(torch.where(before, (kc * bc) @ keys * fade, 0.0) + identity)
    from_start = total.exp()[..., None]
    to_end = (total[..., -1:] - total).exp()[..., None]
    return Chunks(
        solve @ (vc * bc), solve @ (kc * bc * from_start), qc * from_start, kc * to_end, qc @ keys * fade, total[..., -1:, None].exp()
    )


def _sequential(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk after the other."""
    outs = []
    for u, w, q, k, attn, decay in zip(*(part.unbind(2) for part in chunks), strict=True):
        transposed = state.transpose(-1, -2)
        delta = u - w @ transposed
        outs.append(q @ transposed + attn @ delta)
        state = state * decay + delta.transpose(-1, -2) @ k
    return torch.cat(outs, 2), state


def _split(args: ChunkGatedDelta, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Raw q and k [B, Q, Hk, Dk] and v [B, Q, H, Dv]."""
    B, Q, _, width = qkv.shape
    _, H, Dv, Dk = args.state.shape
    q, k, v = qkv.split([Dk, Dk, width - 2 * Dk], -1)
    return q, k, v.reshape(B, Q, H, Dv)


Norm = Callable[[L2Norm], Tensor]
Gates = Callable[[DeltaGates], tuple[Tensor, Tensor]]


def _prepared(args: ChunkGatedDelta, qkv: Tensor, norm: Norm, gates: Gates) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta by token. Without decay and with beta 0 beyond a row's length, tokens leave the state alone."""
    q, k, v = _split(args, qkv)
    q, k = norm(L2Norm(q, args.eps, q.shape[-1] ** -0.5)), norm(L2Norm(k, args.eps, 1.0))
    g, beta = _gates(args, gates)
    valid = _is_valid(args)[:, :, None]
    return q, k, v, torch.where(valid, g, 0.0), torch.where(valid, beta, 0.0)


def _gates(args: ChunkGatedDelta, gates: Gates) -> tuple[Tensor, Tensor]:
    """Log decay and beta by token, [B, Q, H] each."""
    B, Q, Hk, both = args.ba.shape
    # One copy for both: what reads them wants rows side by side.
    b, a = args.ba.view(B, Q, Hk, 2, both // 2).permute(3, 0, 1, 2, 4).reshape(2, B, Q, -1).unbind(0)
    return gates(DeltaGates(a, b, args.a_log, args.dt_bias))


def _is_valid(args: ChunkGatedDelta) -> Tensor:
    """Whether a token is within its row's length, [B, Q]."""
    return torch.arange(args.ba.shape[1], dtype=torch.int32, device=args.ba.device)[None, :] < args.query_lens[:, None]


def _step(args: ChunkGatedDelta) -> tuple[Tensor, Tensor]:
    """Outputs [B, Q, H, Dv] and the states [B, H, Dv, Dk] that go to the write slots."""
    # Tokens beyond a row's length may hold anything, NaN included.
    qkv = torch.where(_is_valid(args)[:, :, None, None], args.qkv, 0.0)
    q, k, v, g, beta = _prepared(args, qkv, l2_norm_reference, delta_gates_reference)
    H = v.shape[2]
    first = read_states(args.state, args.read, args.num_computed_tokens).float()
    q, k = per_value_head(q.float(), H), per_value_head(k.float(), H)
    v, g, beta = (x.float().transpose(1, 2) for x in (v, g, beta))
    out, after = _sequential(_chunks(q, k, v, g, beta, args.chunk), first)
    return out.transpose(1, 2).contiguous().to(args.ba.dtype), after.to(args.state.dtype)


@chunk_gated_delta.reference
def chunk_gated_delta_reference(args: ChunkGatedDelta) -> tuple[Tensor, Tensor]:
    """`gated_delta` of q and k of unit length, q scaled by Dk^-0.5, and of the gates of `delta_gates`, in f32 (arXiv:2412.06464).

    Returns:
        o [B, Q, H, Dv] in the dtype of `ba`, and the pool with the written slots replaced.
    """
    out, after = _step(args)
    return out, args.state.index_put((args.write.flatten().long(),), after)


@chunk_gated_delta.inplace
def _inplace(args: ChunkGatedDelta) -> tuple[Tensor, Tensor]:
    out, after = _step(args)
    return out, args.state.index_put_((args.write.flatten().long(),), after)


def _native_abstract(qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *rest: Any) -> Tensor:
    dtype = torch.bfloat16 if rest[-1] else torch.float32
    return torch.empty(*decay.shape, state.shape[2], dtype=dtype, device=qkv.device)


_token_by_token = Native(
    "npuc_delta_rows",
    "(Tensor qkv, Tensor decay, Tensor beta, Tensor(a!) state, Tensor read, Tensor write, Tensor num_computed_tokens, Tensor query_lens, "
    "float eps, int half) -> Tensor",
    _native_abstract,
).op


@chunk_gated_delta.lowering("inductor")
def chunk_gated_delta_on_cpu(args: ChunkGatedDelta) -> Any:
    """Token by token, not in chunks, with states of float32: rows of a state stay in a core's cache (lowering/cpp/delta_rows.cpp)."""
    qkv, ba, _, _, state, *slots, eps, _ = args
    if state.dtype != torch.float32 or ba.dtype not in (torch.float32, torch.bfloat16):
        return chunk_gated_delta_reference(args)
    g, beta = _gates(args, delta_gates_reference)
    gates = (x.float().contiguous() for x in (g.exp(), beta))
    return _token_by_token(qkv.float().contiguous(), *gates, state, *slots, eps, int(ba.dtype == torch.bfloat16)), state


NPU_CHUNK = 128
"""Tokens a chunk on the NPU: the work within a chunk grows with it, the states between chunks, which are as large, get fewer."""


@chunk_gated_delta.lowering("npu")
def _npu(args: ChunkGatedDelta) -> Any:
    """Plain products in chunks of at least `chunk` tokens. Beyond a row's length qkv is finite (causal_conv.py)."""
    chunk = max(args.chunk, gcd(args.ba.shape[1], NPU_CHUNK))
    q, k, v = _heads_by_chunk(args, chunk)
    q, k = l2_norm_npu(L2Norm(q, args.eps, q.shape[-1] ** -0.5)), l2_norm_npu(L2Norm(k, args.eps, 1.0))
    first = read_states(args.state, args.read, args.num_computed_tokens).float()
    out, after = chunked_delta(q, k, v, *_gates_by_chunk(args, chunk), first)
    write_states_npu(args.state, args.write, after)
    # Where a row is one chunk, `reshape` alone would leave it laid out by head.
    by_token = out.to(args.ba.dtype).transpose(2, 3).contiguous()
    return by_token.reshape(*args.ba.shape[:2], *args.state.shape[1:3]), args.state


def _heads_by_chunk(args: ChunkGatedDelta, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw q and k [B, N, Hk, C, Dk] and v [B, N, H, C, Dv], contiguous, f32."""
    (B, Q, Hk, width), (_, _, Dv, Dk) = args.qkv.shape, args.state.shape
    qkv = args.qkv.float()
    if Dk != Dv:
        q, k, v = (_by_chunk(x, chunk) for x in _split(args, qkv))
        return q, k, v
    # Heads of one width change places together, and are taken apart after that.
    heads = qkv.view(B, Q // chunk, chunk, Hk, width // Dk, Dk).permute(0, 1, 3, 4, 2, 5).contiguous()
    q, k, v = heads.split([1, 1, width // Dk - 2], 3)
    return q.squeeze(3), k.squeeze(3), v.reshape(B, Q // chunk, -1, chunk, Dv)


def _by_chunk(x: Tensor, chunk: int) -> Tensor:
    """[B, Q, H, D] -> [B, N, H, C, D], contiguous."""
    by_chunk: Tensor = x.unflatten(1, (-1, chunk))
    return by_chunk.transpose(2, 3).contiguous()


def _gates_by_chunk(args: ChunkGatedDelta, chunk: int) -> tuple[Tensor, Tensor]:
    """Log decay and log of beta [B, N, H, C] f32; 0 and `HIDDEN` beyond a row's length.

    The log of a sigmoid is a softplus too, `log sigmoid(b) = -softplus(-b)`: one mask and one activation make both gates.
    """
    B, Q, Hk, both = args.ba.shape
    a_log, dt_bias = args.a_log.view(Hk, -1), args.dt_bias.view(Hk, -1)
    side = torch.arange(2, device=args.ba.device)[:, None]
    bias = torch.stack([torch.zeros_like(dt_bias), dt_bias], 1)
    factor = torch.stack([-torch.ones_like(a_log), -a_log.exp()], 1)
    signed = torch.addcmul(bias, args.ba.float().view(B, Q, Hk, 2, both // 2), torch.where(side == 0, -1.0, 1.0))
    masked = torch.where(_is_valid(args)[:, :, None, None, None], signed, torch.where(side == 0, -HIDDEN, HIDDEN))
    gates = (torch.nn.functional.softplus(masked) * factor).view(B, Q // chunk, chunk, Hk, 2, both // 2)
    log_beta, g = gates.permute(4, 0, 1, 3, 5, 2).contiguous().unbind(0)
    return g.flatten(2, 3), log_beta.flatten(2, 3)


@chunk_gated_delta.lowering("npu", needs=("aclgraph", "cann>=9.0"))
@chunk_gated_delta.lowering("npu", needs=("ge", "cann>=9.1"))
def _npu_operator(args: ChunkGatedDelta) -> Any:
    """CANN's chunked operator. Definitions of operators that torchair converts to GE were read for CANN 9.1."""
    return _in_chunks(args, delta_gates_reference)


@chunk_gated_delta.lowering("npu", needs=("aclgraph", "cann>=9.0", "vllm-ascend"))
def _npu_operator_vllm(args: ChunkGatedDelta) -> Any:
    """With the gates of vllm-ascend."""
    return _in_chunks(args, delta_gates_vllm)


def _in_chunks(args: ChunkGatedDelta, gates: Gates) -> tuple[Tensor, Tensor]:
    """All rows of the step as sequences of Q tokens: bfloat16 operands and states, heads of up to 128 (CANN 9.0; op-plugin@517f2e7
    docs/zh/custom_APIs/torch_npu/torch_npu-npu_chunk_gated_delta_rule.md)."""
    # bfloat16 on a device; float32 where a graph is verified in it, which a rounding here would spoil.
    half = args.ba.dtype
    q, k, v, g, beta = _prepared(args, args.qkv.to(half), l2_norm_npu, gates)
    B, Q, H = g.shape
    out, after = torch.ops.npu.npu_chunk_gated_delta_rule(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        beta=beta.to(half).view(B * Q, H),
        initial_state=read_states(args.state, args.read, args.num_computed_tokens).to(half),
        actual_seq_lengths=torch.full((B,), Q, dtype=torch.int32, device=q.device),
        scale=1.0,
        g=g.float().view(B * Q, H),
    )
    write_states_npu(args.state, args.write, after)
    return out.to(half).view(v.shape), args.state


@chunk_gated_delta.cost
def _cost(args: ChunkGatedDelta) -> Cost:
    (B, Q, Hk, _), (_, H, Dv, Dk) = args.qkv.shape, args.state.shape
    moved = H * Dv * Dk * args.state.dtype.itemsize
    norms_and_gates = Q * (8 * Hk * Dk + 10 * H)
    return Cost(
        B * (Q * H * (8 * Dv * Dk + 4 * args.chunk * (Dk + Dv)) + norms_and_gates),
        nbytes(args.qkv, args.ba, args.a_log, args.dt_bias) + args.read.numel() * moved,
        B * Q * H * Dv * args.ba.dtype.itemsize + args.write.numel() * moved,
    )
