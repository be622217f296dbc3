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


def test_a_written_cache_is_the_sequence_itself() -> None:
    """slot_mapping, cache_write and paged_attention over two chunks equal causal attention over the whole."""
    r = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(1, 7, 4, 5, generator=r), torch.randn(7, 2, 5, generator=r), torch.randn(7, 2, 5, generator=r)
    pools = tuple(torch.full((6, 3, 2, 5), float("nan")) for _ in range(2))
    table, outs, at = torch.tensor([[4, 1, 5]], dtype=torch.int32), [], 0
    for length in (4, 3):
        num_computed_tokens, query_lens = torch.tensor([at], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        slots = ops.slot_mapping(num_computed_tokens, query_lens, table, 3, 4)
        padded = [torch.nn.functional.pad(x[at : at + length], (0, 0, 0, 0, 0, 4 - length), value=float("nan")) for x in (k, v)]
        pools = ops.cache_write(*pools, *padded, slots)
        queries = torch.nn.functional.pad(q[:, at : at + length], (0, 0, 0, 0, 0, 4 - length))
        outs.append(ops.paged_attention(queries, *pools, table, num_computed_tokens, query_lens, 0.4)[0, :length])
        at += length
    want = torch.stack([dense(q[0, t], k[: t + 1], v[: t + 1], 0.4) for t in range(7)])
    torch.testing.assert_close(torch.cat(outs).double(), want, rtol=1e-5, atol=1e-5)


def test_unwritten_keys_that_padding_tokens_see_leave_valid_tokens_alone() -> None:
    """In bfloat16 and with 976 keys: on a CPU with AMX a product reads past the end of such a row, into the next token's weights."""
    generator = torch.Generator().manual_seed(0)
    start, valid, pages = 964, 3, 61
    k, v = (torch.randn(1 + pages, 16, 2, 64, generator=generator).bfloat16() for _ in range(2))
    for cache in (k, v):
        cache[1:].view(-1, 2, 64)[start + valid :] = float("nan")
    q = torch.randn(1, 32, 4, 64, generator=generator).bfloat16()
    table = torch.arange(1, 1 + pages, dtype=torch.int32)[None]
    out = ops.paged_attention(q, k, v, table, *(torch.tensor([n], dtype=torch.int32) for n in (start, valid)), 0.125)
    assert not out[:, :valid].isnan().any()
