"""graphs/ops/delta_tokens.py: the gated delta rule for a few tokens by products is the one token by token, state by state."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.ops import gated_delta
from npucompile.graphs.ops.delta_tokens import delta_after_each_token


@pytest.mark.parametrize("Q", range(1, 9))
@pytest.mark.parametrize("repeated", [False, True], ids=["keys", "equal keys"])
def test_states_and_outputs_are_those_token_by_token(Q: int, repeated: bool) -> None:
    """Equal keys without decay and with beta 1 make every state a product of projections, which loses digits first."""
    r = torch.Generator().manual_seed(Q)
    B, keys, H, Dk, Dv = 3, 2, 6, 8, 5
    q, k = (torch.nn.functional.normalize(torch.randn(B, Q, keys, Dk, generator=r), dim=-1) for _ in range(2))
    v, first = torch.randn(B, Q, H, Dv, generator=r), torch.randn(B, H, Dv, Dk, generator=r)
    g, beta = -5 * torch.rand(B, Q, H, generator=r), torch.rand(B, Q, H, generator=r)
    if repeated:
        k, g, beta = k[:, :1].expand_as(k), torch.zeros_like(g), torch.ones_like(beta)
    operands = (q, k, v, g, beta, first)
    slots = torch.arange(B * Q).view(B, Q) + B
    pool = torch.cat([first, first.new_zeros(B * Q, H, Dv, Dk)])
    want, after = gated_delta.rule("reference")(*operands[:5], pool, torch.arange(B), slots, torch.full((B,), 9), torch.full((B,), Q))
    out, states = delta_after_each_token(*operands)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(states, after[B:].view_as(states), rtol=1e-5, atol=5e-6)
