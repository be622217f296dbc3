"""Gated delta rule: the linear attention of a gated DeltaNet layer, with a pool of recurrent states."""

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..state_slots import num_accepted_tokens, read_states, write_states_npu
from .delta_products import chunked_delta
from .delta_tokens import delta_after_each_token


class GatedDelta(NamedTuple):
    """Operands of `gated_delta`; key head j serves value heads j*r .. j*r+r-1, r = H / Hk."""

    q: Tensor  # [B, Q, Hk, Dk], unit length and scaled already
    k: Tensor  # [B, Q, Hk, Dk], unit length already
    v: Tensor  # [B, Q, H, Dv]
    g: Tensor  # [B, Q, H] f32 log decay, at most 0
    beta: Tensor  # [B, Q, H] in [0, 1]
    state: Tensor  # [S, H, Dv, Dk] pool, any float dtype; states between tokens of one step are f32
    read: Tensor  # [B] slot each row starts from; a row with starts == 0 starts from zeros
    write: Tensor  # [B, W] slots: with chunk == 0, W == Q, one for the state after every valid token; else W == 1, after the last one
    num_computed_tokens: Tensor  # [B] tokens before this step
    query_lens: Tensor  # [B] valid tokens in this step
    chunk: int  # 0 runs token by token (decode, verify); else tokens a chunk, a power of two that divides Q (prefill)


gated_delta = Primitive(
    "gated_delta",
    GatedDelta,
    factors="_ _ h _, _ _ h _, _ _ h _, _ _ h, _ _ h, _ h _ _, _, _ _, _, _ -> _ _ h _, _ h _ _",
    donates=((5, 1),),
)


@gated_delta.abstract
def _abstract(args: GatedDelta) -> tuple[Tensor, Tensor]:
    return torch.empty(args.v.shape, dtype=args.v.dtype, device=args.v.device), torch.empty_like(args.state)


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, Q, Hk, D] f32 -> [B, H, Q, D]: key head j serves the value heads j*r .. j*r+r-1."""
    B, Q, own, D = x.shape
    return x[:, :, :, None].expand(B, Q, own, heads // own, D).reshape(B, Q, heads, D).transpose(1, 2)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token; all f32, q, k [B,H,Q,Dk], v [B,H,Q,Dv], g, beta [B,H,Q], state [B,H,Dv,Dk].

    The old state is read once a token: with a = S k and e = S q of the old state, d = beta (v - e^g a) and o = e^g e + (q.k) d.

    Returns:
        o [B, H, Q, Dv] and the states after each token [B, Q, H, Dv, Dk].
    """
    outs, states = [], []
    for t in range(q.shape[2]):
        qt, kt, vt = q[:, :, t], k[:, :, t], v[:, :, t]
        decay = g[:, :, t].exp()[..., None]
        state_k = (state * kt[..., None, :]).sum(-1)
        state_q = (state * qt[..., None, :]).sum(-1)
        delta = beta[:, :, t, None] * (vt - decay * state_k)
        outs.append(decay * state_q + (qt * kt).sum(-1, keepdim=True) * delta)
        state = state * decay[..., None] + delta[..., None] * kt[..., None, :]
        states.append(state)
    return torch.stack(outs, 2), torch.stack(states, 1)


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


def _valid(args: GatedDelta) -> GatedDelta:
    """With zeros for tokens beyond a row's length, which must leave its state alone, whatever (NaN included) they hold."""
    q, k, v, g, beta, *_ = args
    valid = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)[None, :] < args.query_lens[:, None]
    k, v = torch.where(valid[:, :, None, None], k, 0.0), torch.where(valid[:, :, None, None], v, 0.0)
    g, beta = torch.where(valid[:, :, None], g, 0.0), torch.where(valid[:, :, None], beta, 0.0)
    return args._replace(k=k, v=v, g=g, beta=beta)


def _step(args: GatedDelta) -> tuple[Tensor, Tensor]:
    """Outputs [B, Q, H, Dv] and the states [B*W, H, Dv, Dk] that go to the write slots."""
    q, k, v, g, beta, state, read, _, num_computed_tokens, _, chunk = _valid(args) if args.chunk else args
    H = g.shape[2]
    first = read_states(state, read, num_computed_tokens).float()
    q, k = _per_value_head(q.float(), H), _per_value_head(k.float(), H)
    wide, g, beta = v.float().transpose(1, 2), g.float().transpose(1, 2), beta.float().transpose(1, 2)
    if chunk:
        out, after = _sequential(_chunks(q, k, wide, g, beta, chunk), first)
    else:
        out, states = _recurrent(q, k, wide, g, beta, first)
        after = states.flatten(0, 1)
    return out.transpose(1, 2).contiguous().to(v.dtype), after.to(state.dtype)


@gated_delta.reference
def gated_delta_reference(args: GatedDelta) -> tuple[Tensor, Tensor]:
    """Per value head: `S = e^g S; d = beta (v - S k); S = S + d k'; o = S q`, in f32 (arXiv:2412.06464).

    Returns:
        o [B, Q, H, Dv] in the dtype of v, and the pool with the written slots replaced.
    """
    out, after = _step(args)
    return out, args.state.index_put((args.write.flatten().long(),), after)


@gated_delta.inplace
def _inplace(args: GatedDelta) -> tuple[Tensor, Tensor]:
    out, after = _step(args)
    return out, args.state.index_put_((args.write.flatten().long(),), after)


def _native_abstract(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


_token_by_token = Native(
    "npuc_delta",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor read, Tensor write, "
    "Tensor num_computed_tokens) -> Tensor",
    _native_abstract,
).op


@gated_delta.lowering("inductor")
def gated_delta_on_cpu(args: GatedDelta) -> Any:
    """Token by token in float32 by a kernel that reads and writes states in the pool (lowering/cpp/delta.cpp)."""
    q, k, v, g, beta, state, read, write, num_computed_tokens, _, chunk = args
    if chunk or {x.dtype for x in (q, k, v, g, beta, state)} != {torch.float32}:
        return gated_delta_reference(args)
    return _token_by_token(q, k, v, g, beta, state, read, write, num_computed_tokens), state


NPU_TOKENS = 8
"""Tokens a row may have in one step of CANN's recurrent operator."""

VLLM_TOKENS = 16
"""The same of vllm-ascend's (MAX_MTP; vllm-project/vllm-ascend@182b75e csrc/attention/recurrent_gated_delta_rule/op_kernel)."""

NPU_CHUNK = 128
"""Tokens a chunk on the NPU: the work within a chunk grows with it, the states between chunks, which are as large, get fewer."""


@gated_delta.lowering("npu")
def _npu_products(args: GatedDelta) -> Any:
    """Products for CANN 8.3, which has no operator for it; token by token, `read` must hold a state.

    Raises:
        PrimitiveError: a row has more than `NPU_TOKENS` tokens with a state after each.
    """
    return _in_products(args) if args.chunk else _after_each_token(args)


@gated_delta.lowering("npu", needs=("cann>=8.5",))
def _npu(args: GatedDelta) -> Any:
    """CANN's recurrent operator token by token, plain products in chunks of at least `chunk` tokens.

    The operator starts a row from one of the slots it writes, whatever `num_computed_tokens` is: token by token, `read` must be one
    of a row's `write` slots and hold a state.

    Raises:
        PrimitiveError: a row has more tokens than the operator takes, or the state is of another dtype than it takes.
    """
    return _in_products(args) if args.chunk else _by_token(args)


@gated_delta.lowering("npu", needs=("cann>=8.5", "vllm-ascend"))
def _npu_vllm(args: GatedDelta) -> Any:
    """vllm-ascend's recurrent operator, whose states may be float32."""
    return _in_products(args) if args.chunk else _by_token_vllm(args)


@gated_delta.lowering("npu", needs=("aclgraph", "cann>=9.0"))
def _npu_chunk(args: GatedDelta) -> Any:
    """CANN's chunked operator, which GE graphs do not take."""
    return _in_chunks(args) if args.chunk else _by_token(args)


@gated_delta.lowering("npu", needs=("aclgraph", "cann>=9.0", "vllm-ascend"))
def _npu_chunk_vllm(args: GatedDelta) -> Any:
    return _in_chunks(args) if args.chunk else _by_token_vllm(args)


def _in_products(args: GatedDelta) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = _masked(args)
    first = read_states(args.state, args.read, args.num_computed_tokens).float()
    out, after = chunked_delta(q, k, v, g, beta, first, max(args.chunk, gcd(g.shape[1], NPU_CHUNK)))
    write_states_npu(args.state, args.write, after)
    return out.to(v.dtype), args.state


def _in_chunks(args: GatedDelta) -> tuple[Tensor, Tensor]:
    """All rows of the step as sequences of Q tokens: bfloat16 operands and states, heads of up to 128 (CANN 9.0; op-plugin@517f2e7
    docs/zh/custom_APIs/torch_npu/torch_npu-npu_chunk_gated_delta_rule.md)."""
    q, k, v, g, beta = _masked(args)
    B, Q, H = g.shape
    # bfloat16 on a device; float32 where a graph is verified in it, which a rounding here would spoil.
    half = v.dtype
    out, after = torch.ops.npu.npu_chunk_gated_delta_rule(
        q.to(half).flatten(0, 1),
        k.to(half).flatten(0, 1),
        v.to(half).flatten(0, 1),
        beta=beta.to(half).view(B * Q, H),
        initial_state=read_states(args.state, args.read, args.num_computed_tokens).to(half),
        actual_seq_lengths=torch.full((B,), Q, dtype=torch.int32, device=q.device),
        scale=1.0,
        g=g.float().view(B * Q, H),
    )
    write_states_npu(args.state, args.write, after)
    return out.to(v.dtype).view(v.shape), args.state


def _masked(args: GatedDelta) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta; without decay and with beta 0 beyond a row's length, where q, k and v are finite (causal_conv.py), tokens leave
    the state alone."""
    q, k, v, g, beta, *_ = args
    valid = torch.arange(g.shape[1], dtype=torch.int32, device=g.device)[None, :, None] < args.query_lens[:, None, None]
    return q, k, v, torch.where(valid, g, 0.0), torch.where(valid, beta, 0.0)


def _after_each_token(args: GatedDelta) -> tuple[Tensor, Tensor]:
    if (tokens := args.g.shape[1]) > NPU_TOKENS:
        raise PrimitiveError(f"gated_delta token by token has {tokens} tokens a row; products of one chunk take at most {NPU_TOKENS}")
    # Products spread what is not finite in one token over its row, so tokens beyond a row's length become zeros.
    q, k, v, g, beta, *_ = _valid(args)
    out, states = delta_after_each_token(q, k, v, g, beta, args.state.index_select(0, args.read).float())
    write_states_npu(args.state, args.write, states.flatten(0, 1))
    return out.to(args.v.dtype), args.state


def _by_token(args: GatedDelta) -> tuple[Tensor, Tensor]:
    v, state = args.v, args.state
    if state.dtype != v.dtype:
        raise PrimitiveError(
            f"gated_delta token by token has a state of {state.dtype} and values of {v.dtype}; CANN's operator takes equal types"
        )
    B, Q, _ = args.g.shape
    lengths = torch.full((B,), Q, dtype=torch.int32, device=v.device)
    operands, options = _tokens(args, NPU_TOKENS)
    out, after = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(*operands, state, actual_seq_lengths=lengths, **options)
    return out.to(v.dtype).view(v.shape), after


def _by_token_vllm(args: GatedDelta) -> tuple[Tensor, Tensor]:
    """Its lengths are preceded by the first token of the first row (csrc/attention/recurrent_gated_delta_rule/op_kernel)."""
    B, Q, _ = args.g.shape
    lengths = torch.where(torch.arange(B + 1, dtype=torch.int32, device=args.g.device) == 0, 0, Q).to(torch.int32)
    operands, options = _tokens(args, VLLM_TOKENS)
    rule = torch.ops._C_ascend.npu_recurrent_gated_delta_rule
    return rule(*operands, args.state, actual_seq_lengths=lengths, **options).view(args.v.shape), args.state


def _tokens(args: GatedDelta, most: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Operands and options that both recurrent operators share; rows lie one after the other."""
    q, k, v, g, beta, _, read, write, *_ = args
    B, Q, H = g.shape
    if most < Q:
        raise PrimitiveError(f"gated_delta token by token has {Q} tokens a row; the NPU's operator takes at most {most}")
    operands = q.to(v.dtype).flatten(0, 1), k.to(v.dtype).flatten(0, 1), v.reshape(B * Q, H, -1)
    return operands, {
        "beta": beta.to(v.dtype).reshape(B * Q, H),
        "scale": 1.0,
        "ssm_state_indices": write.reshape(-1),
        "num_accepted_tokens": num_accepted_tokens(read, write) if Q > 1 else None,
        "g": g.float().reshape(B * Q, H),
    }


@gated_delta.cost
def _cost(args: GatedDelta) -> Cost:
    q, k, v, g, beta, state, read, write, _, _, chunk = args
    entries = state[0].numel()
    per_token = 8 * entries + (4 * chunk * (q.shape[-1] + v.shape[-1]) * g.shape[2] if chunk else 0)
    moved = entries * state.dtype.itemsize
    return Cost(
        q.shape[0] * q.shape[1] * per_token,
        nbytes(q, k, v, g, beta) + read.numel() * moved,
        nbytes(v) + write.numel() * moved,
    )
