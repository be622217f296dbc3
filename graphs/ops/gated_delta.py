"""Gated delta rule token by token: the linear attention of a gated DeltaNet layer, with a pool of recurrent states."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..state_slots import num_accepted_tokens, read_states, write_states_npu
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
    write: Tensor  # [B, Q] slots, one for the state after every valid token
    num_computed_tokens: Tensor  # [B] tokens before this step
    query_lens: Tensor  # [B] valid tokens in this step


gated_delta = Primitive(
    "gated_delta",
    GatedDelta,
    factors="_ _ h _, _ _ h _, _ _ h _, _ _ h, _ _ h, _ h _ _, _, _ _, _, _ -> _ _ h _, _ h _ _",
    donates=((5, 1),),
)


@gated_delta.abstract
def _abstract(args: GatedDelta) -> tuple[Tensor, Tensor]:
    return torch.empty(args.v.shape, dtype=args.v.dtype, device=args.v.device), torch.empty_like(args.state)


def per_value_head(x: Tensor, heads: int) -> Tensor:
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


def _step(args: GatedDelta) -> tuple[Tensor, Tensor]:
    """Outputs [B, Q, H, Dv] and the states [B*Q, H, Dv, Dk] that go to the write slots."""
    q, k, v, g, beta, state, read, _, num_computed_tokens, _ = args
    H = g.shape[2]
    first = read_states(state, read, num_computed_tokens).float()
    q, k = per_value_head(q.float(), H), per_value_head(k.float(), H)
    wide, g, beta = (x.float().transpose(1, 2) for x in (v, g, beta))
    out, states = _recurrent(q, k, wide, g, beta, first)
    return out.transpose(1, 2).contiguous().to(v.dtype), states.flatten(0, 1).to(state.dtype)


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
    """Token by token in float32, of float32 or bfloat16, by a kernel that reads and writes states in the pool (lowering/cpp/delta.cpp)."""
    q, k, v, g, beta, state, read, write, num_computed_tokens, _ = args
    one_dtype = {x.dtype for x in (q, k, v)} in ({torch.float32}, {torch.bfloat16})
    if not one_dtype or {g.dtype, state.dtype} != {torch.float32}:
        return gated_delta_reference(args)
    return _token_by_token(q, k, v, g, beta.float(), state, read, write, num_computed_tokens), state


NPU_TOKENS = 8
"""Tokens a row may have in one step of CANN's recurrent operator."""

VLLM_TOKENS = 16
"""The same of vllm-ascend's (MAX_MTP; vllm-project/vllm-ascend@182b75e csrc/attention/recurrent_gated_delta_rule/op_kernel)."""


@gated_delta.lowering("npu")
def _npu_products(args: GatedDelta) -> Any:
    """Products for CANN 8.3, which has no operator for it; `read` must hold a state.

    Raises:
        PrimitiveError: a row has more than `NPU_TOKENS` tokens.
    """
    if (tokens := args.g.shape[1]) > NPU_TOKENS:
        raise PrimitiveError(f"gated_delta token by token has {tokens} tokens a row; products of one chunk take at most {NPU_TOKENS}")
    # Products spread what is not finite in one token over its row, so tokens beyond a row's length become zeros.
    q, k, v, g, beta, *_ = _valid(args)
    out, states = delta_after_each_token(q, k, v, g, beta, args.state.index_select(0, args.read).float())
    write_states_npu(args.state, args.write, states.flatten(0, 1))
    return out.to(args.v.dtype), args.state


@gated_delta.lowering("npu", needs=("cann>=8.5",))
def _npu(args: GatedDelta) -> Any:
    """CANN's recurrent operator.

    It starts a row from one of the slots it writes, whatever `num_computed_tokens` is: `read` must be one of a row's `write` slots and
    hold a state.

    Raises:
        PrimitiveError: a row has more tokens than the operator takes, or the state is of another dtype than it takes.
    """
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


@gated_delta.lowering("npu", needs=("cann>=8.5", "vllm-ascend"))
def _npu_vllm(args: GatedDelta) -> Any:
    """vllm-ascend's recurrent operator, whose states may be float32.

    Its lengths are preceded by the first token of the first row (csrc/attention/recurrent_gated_delta_rule/op_kernel).
    """
    B, Q, _ = args.g.shape
    lengths = torch.where(torch.arange(B + 1, dtype=torch.int32, device=args.g.device) == 0, 0, Q).to(torch.int32)
    operands, options = _tokens(args, VLLM_TOKENS)
    rule = torch.ops._C_ascend.npu_recurrent_gated_delta_rule
    return rule(*operands, args.state, actual_seq_lengths=lengths, **options).view(args.v.shape), args.state


def _valid(args: GatedDelta) -> GatedDelta:
    """With zeros for tokens beyond a row's length, which must leave its state alone, whatever (NaN included) they hold."""
    q, k, v, g, beta, *_ = args
    valid = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)[None, :] < args.query_lens[:, None]
    k, v = torch.where(valid[:, :, None, None], k, 0.0), torch.where(valid[:, :, None, None], v, 0.0)
    g, beta = torch.where(valid[:, :, None], g, 0.0), torch.where(valid[:, :, None], beta, 0.0)
    return args._replace(k=k, v=v, g=g, beta=beta)


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
    q, k, v, g, beta, state, read, write, *_ = args
    entries = state[0].numel()
    moved = entries * state.dtype.itemsize
    return Cost(
        8 * q.shape[0] * q.shape[1] * entries,
        nbytes(q, k, v, g, beta) + read.numel() * moved,
        nbytes(v) + write.numel() * moved,
    )
