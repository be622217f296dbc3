"""Turns queries, keys, values and gates into the outputs of a gated delta rule, with a pool of recurrent states."""

import torch

from ..primitive import Cost, Primitive, nbytes
from ..slots import read_slots

gated_delta = Primitive(
    "gated_delta",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor read, Tensor write, Tensor starts, "
    "Tensor lengths, int chunk) -> (Tensor, Tensor)",
    factors="_ _ h _, _ _ h _, _ _ h _, _ _ h, _ _ h, _ h _ _, _, _ _, _, _ -> _ _ h _, _ h _ _",
    donates=((5, 1),),
)


@gated_delta.abstract
def _abstract(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), torch.empty_like(state)


def _per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, Q, Hk, D] f32 -> [B, H, Q, D]: key head j serves the value heads j*r .. j*r+r-1."""
    B, Q, own, D = x.shape
    return x[:, :, :, None].expand(B, Q, own, heads // own, D).reshape(B, Q, heads, D).transpose(1, 2)


def _recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token; all f32, q, k [B,H,Q,Dk], v [B,H,Q,Dv], g, beta [B,H,Q], state [B,H,Dk,Dv].

    The old state is read once a token: with a = S'k and e = S'q of the old state, d = beta (v - e^g a) and o = e^g e + (q.k) d.

    Returns:
        o [B, H, Q, Dv] and the states after each token [B, Q, H, Dk, Dv].
    """
    outs, states = [], []
    for t in range(q.shape[2]):
        qt, kt, vt = q[:, :, t], k[:, :, t], v[:, :, t]
        decay = g[:, :, t].exp()[..., None]
        seen_k = (state * kt[..., None]).sum(-2)
        seen_q = (state * qt[..., None]).sum(-2)
        delta = beta[:, :, t, None] * (vt - decay * seen_k)
        outs.append(decay * seen_q + (qt * kt).sum(-1, keepdim=True) * delta)
        state = state * decay[..., None] + kt[..., None] * delta[:, :, None, :]
        states.append(state)
    return torch.stack(outs, 2), torch.stack(states, 1)


def _unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of unit lower-triangular matrices [..., C, C], C a power of two, by merging diagonal blocks.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: at each level T holds the inverses of blocks of size s and
    T @ (L masked to the B blocks) @ T is exactly the missing part. Powers of L - I, the other way that needs no solver,
    lose all f32 digits when keys repeat.
    """
    C = lower.shape[-1]
    row = torch.arange(C, device=lower.device)
    inverse = (row[:, None] == row[None, :]).to(lower.dtype).expand(lower.shape)
    size = 1
    while size < C:
        block = row // size
        corner = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        inverse = inverse - inverse @ (lower * corner) @ inverse
        size *= 2
    return inverse


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rule a chunk of tokens at a time (arXiv:2412.06464, section 3.3); shapes as _recurrent, Q a multiple of chunk.

    Returns:
        o [B, H, Q, Dv] and the last state [B, H, Dk, Dv].
    """
    row = torch.arange(chunk, device=q.device)
    visible, before = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    qc, kc, vc, bc = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, beta[..., None]))
    total = g.unflatten(2, (-1, chunk)).cumsum(-1)
    fade = torch.where(visible, (total[..., :, None] - total[..., None, :]).clamp(max=0.0).exp(), 0.0)
    keys = kc.transpose(-1, -2)
    identity = (row[:, None] == row[None, :]).to(q.dtype)
    solve = _unit_lower_inverse(torch.where(before, (kc * bc) @ keys * fade, 0.0) + identity)
    grown = total.exp()[..., None]
    left = (total[..., -1:] - total).exp()[..., None]
    # All that does not depend on the state is one product over all chunks; only the state goes from chunk to chunk.
    parts = (
        solve @ (vc * bc),
        solve @ (kc * bc * grown),
        qc * grown,
        qc @ keys * fade,
        (kc * left).transpose(-1, -2),
        total[..., -1:, None].exp(),
    )
    outs = []
    for value, seen, reach, attend, keep, decay in zip(*(part.unbind(2) for part in parts), strict=True):
        delta = value - seen @ state
        outs.append(reach @ state + attend @ delta)
        state = state * decay + keep @ delta
    return torch.cat(outs, 2), state


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, Q, H, Dv] and the states [B*W, H, Dk, Dv] that go to the write slots."""
    Q, H = g.shape[1:]
    first = read_slots(state, read, starts).float()
    if chunk:
        # Tokens beyond a row's length must leave its state alone, whatever (NaN included) they hold.
        valid = torch.arange(Q, dtype=torch.int32, device=q.device)[None, :] < lengths[:, None]
        k, v = torch.where(valid[:, :, None, None], k, 0.0), torch.where(valid[:, :, None, None], v, 0.0)
        g, beta = torch.where(valid[:, :, None], g, 0.0), torch.where(valid[:, :, None], beta, 0.0)
    q, k = _per_value_head(q.float(), H), _per_value_head(k.float(), H)
    wide, g, beta = v.float().transpose(1, 2), g.float().transpose(1, 2), beta.float().transpose(1, 2)
    if chunk:
        out, last = _chunked(q, k, wide, g, beta, first, chunk)
        after = last
    else:
        out, states = _recurrent(q, k, wide, g, beta, first)
        after = states.flatten(0, 1)
    return out.transpose(1, 2).contiguous().to(v.dtype), after.to(state.dtype)


@gated_delta.reference
def gated_delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per value head: `S = e^g S; d = beta (v - S'k); S = S + k d'; o = S'q`, in f32 (arXiv:2412.06464).

    Args:
        q, k: [B, Q, Hk, Dk], unit length (and q scaled) already; key head j serves value heads j*r .. j*r+r-1.
        v: [B, Q, H, Dv].
        g: [B, Q, H] f32 log decay, at most 0.
        beta: [B, Q, H] in [0, 1].
        state: [S, H, Dk, Dv] pool.
        read: [B] slot each row starts from; a row with starts == 0 starts from zeros.
        write: [B, W] slots: with chunk == 0, W == Q and the state after every token is stored; else W == 1 and the state
            after the last valid token is.
        starts, lengths: [B] tokens before this step, and valid tokens in it.
        chunk: 0 runs token by token (decode, verify); else tokens a chunk, a power of two that divides Q (prefill).

    Returns:
        o [B, Q, H, Dv] in the dtype of v, and the pool with the written slots replaced.
    """
    out, after = _step(q, k, v, g, beta, state, read, write, starts, lengths, chunk)
    return out, state.index_put((write.flatten().long(),), after)


@gated_delta.inplace
def _inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, after = _step(q, k, v, g, beta, state, read, write, starts, lengths, chunk)
    return out, state.index_put_((write.flatten().long(),), after)


@gated_delta.cost
def _cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int,
) -> Cost:
    one = state[0].numel()
    per_token = 8 * one + (4 * chunk * (q.shape[-1] + v.shape[-1]) * g.shape[2] if chunk else 0)
    moved = one * state.dtype.itemsize
    return Cost(
        q.shape[0] * q.shape[1] * per_token,
        nbytes(q, k, v, g, beta) + read.numel() * moved,
        nbytes(v) + write.numel() * moved,
    )
