"""graphs/ops/mla_attention.py: attention over latents equals attention over the keys and values that each head makes of them."""

from __future__ import annotations

import random

import pytest
import torch

from npucompile.graphs import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["reference", "lowering:inductor"])
def test_absorbed_attention_is_that_of_expanded_keys_and_values(rule: str, dtype: torch.dtype) -> None:
    """Head by head and query by query in f64: keys `[W_k c, rotary]`, values `W_v c`, of the entries gathered in plain Python."""
    r, pick = torch.Generator().manual_seed(0), random.Random(0)
    B, Q, N, P, H, L, R, K, V = 3, 3, 4, 5, 4, 8, 4, 6, 7
    pages = list(range(1, B * N + 1))
    pick.shuffle(pages)
    table, lengths, computed = torch.tensor(pages, dtype=torch.int32).view(B, N), [3, 1, 0], [14, 3, 0]
    q, q_rope = torch.randn(B, Q, H, K, generator=r).to(dtype), torch.randn(B, Q, H, R, generator=r).to(dtype)
    cache, rope_cache = (torch.randn(B * N + 1, P, 1, width, generator=r).to(dtype) for width in (L, R))
    up_k, up_v = (torch.randn(H, width, L, generator=r).to(dtype) * L**-0.5 for width in (K, V))
    latent_q = ops.head_linear(q.flatten(0, 1), up_k).view(B, Q, H, L)
    at = [torch.tensor(x, dtype=torch.int32) for x in (computed, lengths)]
    out = ops.mla_attention.rule(rule)(latent_q, q_rope, cache, rope_cache, table, *at, 0.3)
    values = ops.head_linear(out.flatten(0, 1), up_v.transpose(1, 2)).view(B, Q, H, V)
    for b in range(B):
        for t in range(lengths[b]):
            entries = [(int(table[b, j // P]), j % P) for j in range(computed[b] + t + 1)]
            c, rotary = (torch.stack([pool[page, place, 0] for page, place in entries]).double() for pool in (cache, rope_cache))
            for h in range(H):
                scores = (c @ up_k[h].double().T) @ q[b, t, h].double() + rotary @ q_rope[b, t, h].double()
                want = torch.softmax(0.3 * scores, 0) @ (c @ up_v[h].double().T)
                tolerance = 1e-5 if dtype == torch.float32 else 5e-2
                torch.testing.assert_close(values[b, t, h].double(), want, rtol=tolerance, atol=tolerance)
