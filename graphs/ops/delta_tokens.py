"""The gated delta rule for a few tokens a row with the state after each: by matrix products, where a device has no operator for it."""

import torch
from torch import Tensor

from .delta_products import HIDDEN, unit_lower_inverse


def delta_after_each_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of Q tokens in the WY form (arXiv:2412.06464), and the states within it; q and k stay by key head.

    With S the old state, G the sum of log decays and d what each token adds: `S_t = e^G_t S + sum over s <= t of e^(G_t - G_s) d_s k_s'`.
    States are most of what is moved: one product reads the old ones, one makes what the tokens add, and one pass adds both.

    Args:
        q, k: [B, Q, Hk, Dk].
        v: [B, Q, H, Dv].
        g, beta: [B, Q, H].
        state: [B, H, Dv, Dk] f32 before the first token.

    Returns:
        o [B, Q, H, Dv] f32 and the state after every token [B, Q, H, Dv, Dk] f32.
    """
    B, Q, keys, _ = q.shape
    H = v.shape[2]
    both = torch.cat([k, q], 1).transpose(1, 2).contiguous().float()
    k = both[:, :, :Q].contiguous()
    total = g.float().cumsum(1)
    from_start, since = total.exp(), total.transpose(1, 2).contiguous()
    row = torch.arange(Q, device=q.device)
    bound = torch.where(row[:, None] >= row[None, :], 0.0, HIDDEN)
    by_head = beta.transpose(1, 2).contiguous().float()
    fade = torch.minimum(since[..., :, None] - since[..., None, :], bound).exp() * by_head[..., None, :]
    gram = _product(both, k.mT).view(B, keys, 1, 2, Q, Q) * fade.view(B, keys, -1, 1, Q, Q)
    lower, attn = gram.reshape(B, H, 2 * Q, Q).split(Q, 2)
    # What the old state holds for the keys and the queries of all heads that share them.
    held = _product(both, state.view(B, keys, -1, state.shape[-1]).mT).view(B, keys, 2 * Q, H // keys, -1).transpose(2, 3)
    faded = held.reshape(B, H, 2, Q, -1) * since.exp()[:, :, None, :, None]
    of_keys, of_queries = faded.reshape(B, H, 2 * Q, -1).split(Q, 2)
    delta = _product(unit_lower_inverse(lower), v.transpose(1, 2).contiguous().float() - of_keys)
    out = of_queries + _product(attn, delta)
    left = delta[:, None] * fade.transpose(1, 2).contiguous()[..., None]
    repeated = k[:, None, :, None].expand(B, Q, keys, H // keys, Q, -1).reshape(B, Q, H, Q, -1)
    states = torch.addcmul(_product(left.mT, repeated), state[:, None], from_start[..., None, None])
    return out.transpose(1, 2).contiguous(), states


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of equal leading dimensions; a transposed operand stays a view, which a batched product reads as it is."""
    product: Tensor = torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).unflatten(0, a.shape[:-2])
    return product
