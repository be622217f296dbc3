"""graphs/ops/paged_attention.py: paged attention equals dense softmax attention, request by request, over keys gathered in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from npucompile.graphs import ops


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [H, D] over keys and values [K, G, D], in f64, head by head."""
    H, G = q.shape[0], keys.shape[1]
    heads = []
    for h in range(H):
        scores = keys[:, h * G // H].double() @ q[h].double() * scale
        heads.append(torch.softmax(scores, 0) @ values[:, h * G // H].double())
    return torch.stack(heads)


@pytest.mark.parametrize(("H", "G", "D", "P"), [(1, 1, 1, 1), (4, 2, 8, 4), (6, 1, 5, 3), (3, 3, 7, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_attention_per_request(H: int, G: int, D: int, P: int, dtype: torch.dtype) -> None:
    r, pick = torch.Generator().manual_seed(0), random.Random(0)
    B, Q, N = 4, 3, 5
    pages = list(range(1, B * N + 1))
    pick.shuffle(pages)
    table = torch.tensor(pages, dtype=torch.int32).view(B, N)
    query_lens = [3, 1, 2, 0]
    num_computed_tokens = [pick.randrange(N * P - length + 1) for length in query_lens[:3]] + [0]
    q = torch.randn(B, Q, H, D, generator=r).to(dtype)
    pools = [torch.randn(B * N + 1, P, G, D, generator=r).to(dtype) for _ in range(2)]
    got = ops.paged_attention(q, *pools, table, *(torch.tensor(x, dtype=torch.int32) for x in (num_computed_tokens, query_lens)), 0.3)
    for b in range(B):
        for t in range(query_lens[b]):
            positions = range(num_computed_tokens[b] + t + 1)
            keys, values = (torch.stack([pool[table[b, j // P], j % P] for j in positions]) for pool in pools)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got[b, t].double(), dense(q[b, t], keys, values, 0.3), rtol=tolerance, atol=tolerance)
