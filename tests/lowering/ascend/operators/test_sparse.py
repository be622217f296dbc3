"""lowering/ascend/operators/sparse.py: the chosen keys and the attention over them equal plain loops."""

from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import sparse as kernels

TABLE = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([13, 6], dtype=torch.int32)
PAGES = {"block_table": TABLE, "layout_query": "BSND", "sparse_mode": 3}


def entry(cache: torch.Tensor, row: int, position: int) -> torch.Tensor:
    return cache[TABLE[row, position // 8], position % 8, 0].double()


def index(**changes: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    operands = {"query": torch.randn(2, 3, 4, 6), "weights": torch.randn(2, 3, 4), "key": torch.randn(6, 8, 1, 6)}
    options = {**PAGES, "layout_key": "PA_BSND", "actual_seq_lengths_key": LENGTHS, "sparse_count": 5}
    return operands, kernels.npu_lightning_indexer(**(operands | options | changes))[0]


def test_the_best_keys_of_those_that_a_query_sees() -> None:
    operands, indices = index()
    assert (indices.shape, indices.dtype) == ((2, 3, 1, 5), torch.int32)
    for b in range(2):
        for t in range(3):
            seen = int(LENGTHS[b]) - 3 + t + 1
            scores = []
            for j in range(seen):
                products = [float(operands["query"][b, t, h].double() @ entry(operands["key"], b, j)) for h in range(4)]
                scores.append(sum(float(w) * max(p, 0) for w, p in zip(operands["weights"][b, t], products, strict=True)))
            best = sorted(range(seen), key=lambda j, s=scores: -s[j])[:5]
            assert sorted(indices[b, t, 0].tolist()[: len(best)]) == sorted(best)
            assert indices[b, t, 0, len(best) :].tolist() == [-1] * (5 - len(best))


def attention(**changes: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    cache = torch.randn(6, 8, 1, 6)
    operands = {"query": torch.randn(2, 3, 4, 6), "query_rope": torch.randn(2, 3, 4, 2), "key": cache, "value": cache}
    operands["key_rope"] = torch.randn(6, 8, 1, 2)
    chosen = [[[[9, 0, 4]], [[11, 12, 3]], [[12, -1, -1]]], [[[3, 1, -1]], [[0, 4, 2]], [[5, -1, -1]]]]
    operands["sparse_indices"] = torch.tensor(chosen, dtype=torch.int32)
    options = {**PAGES, "layout_kv": "PA_BSND", "actual_seq_lengths_kv": LENGTHS, "attention_mode": 2, "scale_value": 0.3}
    return operands, kernels.npu_sparse_flash_attention(**(operands | options | changes))[0]


def test_attention_over_chosen_keys_that_the_query_sees() -> None:
    """Query 1 of row 0 names position 12, which only query 2 sees."""
    operands, out = attention()
    for b in range(2):
        for t in range(3):
            last = int(LENGTHS[b]) - 3 + t
            places = [j for j in operands["sparse_indices"][b, t, 0].tolist() if 0 <= j <= last]
            latents, rotary = (torch.stack([entry(operands[name], b, j) for j in places]) for name in ("key", "key_rope"))
            for h in range(4):
                scores = latents @ operands["query"][b, t, h].double() + rotary @ operands["query_rope"][b, t, h].double()
                torch.testing.assert_close(out[b, t, h].double(), (scores * 0.3).softmax(0) @ latents, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_count": 4096}, "sparse_count 4096; legal are up to 64, and 1 to 2048"),
        ({"layout_key": "TND"}, "the CPU kernel knows 'BSND', 'PA_BSND' and 3"),
        ({"actual_seq_lengths_key": None}, "actual_seq_lengths of keys is absent"),
        ({"actual_seq_lengths_key": torch.tensor([30, 6], dtype=torch.int32)}, "of 3 pages of 8"),
    ],
)
def test_the_indexer_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        index(**changes)


@pytest.mark.parametrize("changes", [{"attention_mode": 0}, {"sparse_block_size": 2}, {"value": torch.randn(6, 8, 1, 6)}])
def test_attention_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(LoweringError, match="legal are 2, 1, a power of two up to 128, and values that are the keys"):
        attention(**changes)


def test_strides_of_operands_change_no_bit():
    """Two forms of one graph lay values out otherwise, and must choose the same keys of nearly equal ones."""
    generator = torch.Generator().manual_seed(5)
    B, Q, heads, D, P, N = 2, 4, 16, 32, 16, 8
    query, weights = torch.randn(B, Q, heads, D, generator=generator), torch.randn(B, Q, heads, generator=generator)
    cache = torch.randn(B * N, P, 1, D, generator=generator)
    place = {
        "actual_seq_lengths_key": torch.full((B,), 120, dtype=torch.int32),
        "block_table": torch.arange(B * N, dtype=torch.int32).view(B, N),
        "layout_query": "BSND", "layout_key": "PA_BSND", "sparse_count": 24,
    }  # fmt: skip
    strided = query.transpose(1, 2).contiguous().transpose(1, 2), weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided[0].is_contiguous()
    (left, _), (right, _) = (kernels.npu_lightning_indexer(q, cache, w, **place) for q, w in ((query, weights), strided))
    assert torch.equal(left, right)
