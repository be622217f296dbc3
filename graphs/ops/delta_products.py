"""The chunked gated delta rule in few launches: for machines where a step costs by the number of its operators."""

import torch
from torch import Tensor

HIDDEN = -1e30
"""An exponent whose power is 0; the difference to infinity is that products with 0 stay 0."""
_SEQUENTIAL = 8
"""Up to this many chunks a state passes through one after the other; more are composed in pairs first."""
_WIDE_BITS = 2
"""log2 of the blocks that the inverse of a chunk joins at once."""


def chunked_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The WY form (arXiv:2412.06464) with all chunks at once but for the states between them; q and k stay by key head.

    Args:
        q, k: [B, Q, Hk, Dk].
        v: [B, Q, H, Dv].
        g, beta: [B, Q, H] f32; 0 for tokens that leave the state alone.
        state: [B, H, Dv, Dk] f32 before the first token.
        chunk: tokens C of a chunk, a power of two that divides Q.

    Returns:
        o [B, Q, H, Dv] f32 and the state after the last token [B, H, Dv, Dk] f32.
    """
    B, Q, keys, _ = q.shape
    per = v.shape[2] // keys
    row = torch.arange(chunk, device=q.device)
    q, k, v = (_by_chunk(x, chunk) for x in (q, k, v))
    total, beta = (_by_chunk(x, chunk) for x in (g, beta))
    total = total.cumsum(-1)
    # The minimum hides later tokens, and keeps the exponent of earlier ones at most 0 where sums are rounded.
    bound = torch.where(row[:, None] >= row[None, :], 0.0, HIDDEN)
    # What a token leaves to later ones: beta is here, so that neither the inverse nor what it multiplies is scaled by it.
    fade = torch.minimum(total[..., :, None] - total[..., None, :], bound).exp() * beta[..., None, :]
    from_start = total.exp()
    by_key = fade.unflatten(2, (keys, per))
    attn = (_product(q, k.mT)[:, :, :, None] * by_key).flatten(2, 3)
    solve = unit_lower_inverse((_product(k, k.mT)[:, :, :, None] * by_key).flatten(2, 3))
    u, w = _product(solve, v), _product(solve, _scaled(k, from_start))
    to_end = _scaled(k, fade[..., -1, :])
    column = torch.arange(k.shape[-1], device=q.device)
    identity = torch.where(column[:, None] == column[None, :], 1.0, 0.0)
    transition = identity * from_start[..., -1:, None] - _product(w.mT, to_end)
    states, last = _states(_product(u.mT, to_end), transition, state)
    delta = u - _product(w, states.mT)
    out = _product(_scaled(q, from_start), states.mT) + _product(attn, delta)
    return out.transpose(2, 3).reshape(B, Q, keys * per, -1), last


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of `I + A`, A [..., C, C] strictly below the diagonal of `lower`; C is a power of two, or at most 8.

    Four blocks at once. With T the inverse of diagonal blocks and E = -T (A off the blocks), which is nilpotent of order 4, the inverse is
    (I + E)(I + E^2) T: a launch more than with 8 blocks, and two digits more when keys repeat. An odd power of two takes 8 rows in the
    first step, where E is A itself and loses none. Powers of all of A, without blocks, lose all digits.
    """
    C = lower.shape[-1]
    row = torch.arange(C, device=lower.device)
    below = row[:, None] > row[None, :]
    inverse, size = None, 1
    while size < C:
        left = (-(-C // size) - 1).bit_length()
        wide = 1 << (_WIDE_BITS if left % _WIDE_BITS == 0 else min(left, _WIDE_BITS + left % _WIDE_BITS))
        block, inner = row // (size * wide), row // size
        inside = (block[:, None] == block[None, :]) & (inner[:, None] != inner[None, :]) & below
        # A mask that multiplies is one launch, a choice between two tensors is one that reads a third.
        power = lower * torch.where(inside, -1.0, 0.0)
        if inverse is None:
            inverse = (row[:, None] == row[None, :]).to(lower.dtype) + power
        else:
            power = _product(inverse, power)
            inverse = inverse + _product(power, inverse)
        span = 2
        while span < wide:
            power = _product(power, power)
            inverse = inverse + _product(power, inverse)
            span *= 2
        size *= wide
    return torch.ones_like(lower) if inverse is None else inverse


def _by_chunk(x: Tensor, chunk: int) -> Tensor:
    """[B, Q, H, ...] -> [B, N, H, C, ...], contiguous, f32."""
    by_chunk: Tensor = x.unflatten(1, (-1, chunk))
    return by_chunk.transpose(2, 3).contiguous().float()


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x [B, N, Hk, C, D] times scale [B, N, H, C] -> [B, N, H, C, D]."""
    by_key: Tensor = scale.unflatten(2, (x.shape[2], -1))
    return (x[:, :, :, None] * by_key[..., None]).flatten(2, 3)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of equal leading dimensions; a transposed operand stays a view, which a batched product reads as it is."""
    return torch.bmm(_batch(a), _batch(b)).view(*a.shape[:-1], b.shape[-1])


def _batch(x: Tensor) -> Tensor:
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x.reshape(-1, *x.shape[-2:])
    return x.mT.reshape(-1, x.shape[-1], x.shape[-2]).mT


def _states(increment: Tensor, transition: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States [B, N, H, Dv, Dk] before each chunk, and after the last [B, H, Dv, Dk]; a chunk maps S to `S transition + increment`.

    Pairs of chunks are one map first: the chain halves, and a product of all pairs gives the states within them.
    """
    N = increment.shape[1]
    if N <= _SEQUENTIAL or N % 2:
        before = []
        for added, moved in zip(increment.unbind(1), transition.unbind(1), strict=True):
            before.append(state)
            state = _product(state, moved) + added
        return torch.stack(before, 1), state
    (own, other), (transition, following) = (x.unflatten(1, (-1, 2)).unbind(2) for x in (increment, transition))
    first, last = _states(_product(own, following) + other, _product(transition, following), state)
    return torch.stack([first, _product(first, transition) + own], 2).flatten(1, 2), last
