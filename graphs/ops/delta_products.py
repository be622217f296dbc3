"""The chunked gated delta rule in few launches: for machines where a step costs by the number of its operators."""

from collections.abc import Callable

import torch
from torch import Tensor

HIDDEN = -1e30
"""An exponent whose power is 0; the difference to infinity is that products with 0 stay 0."""
_SEQUENTIAL = 8
"""Up to this many chunks a state passes through one after the other; more are composed in pairs first."""
_WIDE_BITS = 2
"""log2 of the blocks that the inverse of a chunk joins at once."""


def chunked_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, log_beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The WY form (arXiv:2412.06464) with all chunks at once but for the states between them; q and k stay by key head.

    Args:
        q, k: [B, N, Hk, C, Dk] f32, N chunks of C tokens, C a power of two.
        v: [B, N, H, C, Dv] f32.
        g, log_beta: [B, N, H, C] f32; 0 and `HIDDEN` for tokens that leave the state alone.
        state: [B, H, Dv, Dk] f32 before the first token.

    Returns:
        o [B, N, H, C, Dv] f32 and the state after the last token [B, H, Dv, Dk] f32.
    """
    keys, chunk = k.shape[2:4]
    per = v.shape[2] // keys
    row = torch.arange(chunk, device=q.device)
    total = g.cumsum(-1)
    # The minimum hides later tokens, and keeps the exponent of earlier ones at most 0 where sums are rounded.
    bound = torch.where(row[:, None] >= row[None, :], 0.0, HIDDEN)
    # What a token leaves to later ones: beta is here, so that neither the inverse nor what it multiplies is scaled by it.
    fade = torch.minimum(total[..., :, None] - (total - log_beta)[..., None, :], bound).exp()
    from_start = total.exp()
    by_key = fade.unflatten(2, (keys, per))
    attn = (_product(q, k.mT)[:, :, :, None] * by_key).flatten(2, 3)
    solve = unit_lower_inverse((_product(k, k.mT)[:, :, :, None] * by_key).flatten(2, 3))
    u, w = _product(solve, v), _product(solve, _scaled(k, from_start))
    to_end = _scaled(k, fade[..., -1, :])
    column = torch.arange(k.shape[-1], device=q.device)
    identity = torch.where(column[:, None] == column[None, :], 1.0, 0.0)
    # The transition but for its sign, which an addition later takes: one launch, where `identity * decay - product` is two.
    negative = torch.addcmul(_product(w.mT, to_end), identity, from_start[..., -1:, None], value=-1)
    states, last = _states(_product(u.mT, to_end), negative, state, torch.sub)
    delta = u - _product(w, states.mT)
    return _product(_scaled(q, from_start), states.mT) + _product(attn, delta), last


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


def _states(increment: Tensor, transition: Tensor, state: Tensor, add: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """States [B, N, H, Dv, Dk] before each chunk, and after the last [B, H, Dv, Dk]; a chunk maps S to `add(increment, S transition)`.

    Pairs of chunks are one map first: the chain halves, and a product of all pairs gives the states within them.

    Args:
        add: torch.add, or torch.sub where `transition` has the other sign; the product of two such has none.
    """
    N = increment.shape[1]
    if N <= _SEQUENTIAL or N % 2:
        before = []
        for added, moved in zip(increment.unbind(1), transition.unbind(1), strict=True):
            before.append(state)
            state = add(added, _product(state, moved))
        return torch.stack(before, 1), state
    (own, other), (transition, following) = (x.unflatten(1, (-1, 2)).unbind(2) for x in (increment, transition))
    first, last = _states(add(other, _product(own, following)), _product(transition, following), state, torch.add)
    return torch.stack([first, add(own, _product(first, transition))], 2).flatten(1, 2), last
