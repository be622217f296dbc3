"""lowering/ascend/operators/quant_sparse.py: keys chosen by int8 and attention over packed latents equal plain loops."""

from typing import Any

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ops.packed_latents import packed_width, unpacked
from npucompile.graphs.quantise import quantise_rows
from npucompile.lowering.ascend.operators import quant_sparse as kernels

TABLE = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([13, 6], dtype=torch.int32)
PAGES = {"block_table": TABLE, "layout_query": "BSND", "sparse_mode": 3}


def entry(cache: torch.Tensor, row: int, position: int) -> torch.Tensor:
    return cache[TABLE[row, position // 8], position % 8, 0]


def index(**changes: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    (rows, own), (keys, scale) = quantise_rows(torch.randn(2, 3, 4, 6)), quantise_rows(torch.randn(6, 8, 1, 6))
    operands = {"query": rows, "key": keys, "weights": torch.randn(2, 3, 4).half()}
    operands |= {"query_dequant_scale": own.half(), "key_dequant_scale": scale.half()}
    options = {**PAGES, "layout_key": "PA_BSND", "actual_seq_lengths_key": LENGTHS, "sparse_count": 5}
    modes = {"query_quant_mode": 0, "key_quant_mode": 0}
    return operands, kernels.npu_quant_lightning_indexer(**(operands | options | modes | changes))


def test_the_best_keys_by_integers_and_scales() -> None:
    operands, indices = index()
    assert (indices.shape, indices.dtype) == ((2, 3, 1, 5), torch.int32)
    shares = (operands["weights"] * operands["query_dequant_scale"]).double()
    for b in range(2):
        for t in range(3):
            seen = int(LENGTHS[b]) - 3 + t + 1
            scores = []
            for j in range(seen):
                products = [int(operands["query"][b, t, h].int() @ entry(operands["key"], b, j).int()) for h in range(4)]
                total = sum(float(w) * max(p, 0) for w, p in zip(shares[b, t], products, strict=True))
                scores.append(total * float(entry(operands["key_dequant_scale"].unsqueeze(-1), b, j)))
            best = sorted(range(seen), key=lambda j, s=scores: -s[j])[:5]
            assert sorted(indices[b, t, 0].tolist()[: len(best)]) == sorted(best)
            assert indices[b, t, 0, len(best) :].tolist() == [-1] * (5 - len(best))


def attention(**changes: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    empty = torch.zeros(6, 8, 1, packed_width(6, 2, torch.float32), dtype=torch.int8)
    cache = ops.packed_latent_write(empty, torch.randn(48, 1, 6), torch.randn(48, 1, 2), torch.arange(48))
    operands = {"query": torch.randn(2, 3, 4, 8), "key": cache, "value": cache}
    chosen = [[[[9, 0, 4]], [[11, 12, 3]], [[12, -1, -1]]], [[[3, 1, -1]], [[0, 4, 2]], [[5, -1, -1]]]]
    operands["sparse_indices"] = torch.tensor(chosen, dtype=torch.int32)
    options = {**PAGES, "layout_kv": "PA_BSND", "actual_seq_lengths_kv": LENGTHS, "attention_mode": 2, "scale_value": 0.3}
    options |= {"key_quant_mode": 2, "value_quant_mode": 2, "tile_size": 6, "rope_head_dim": 2}
    return operands, kernels.npu_kv_quant_sparse_flash_attention(**(operands | options | changes))


def test_attention_over_chosen_rows_that_the_query_sees() -> None:
    """Query 1 of row 0 names position 12, which only query 2 sees."""
    operands, out = attention()
    latents, rotary = (part.double() for part in unpacked(operands["key"], 6, torch.float32))
    for b in range(2):
        for t in range(3):
            last = int(LENGTHS[b]) - 3 + t
            places = [j for j in operands["sparse_indices"][b, t, 0].tolist() if 0 <= j <= last]
            rows = torch.stack([torch.cat([entry(latents, b, j), entry(rotary, b, j)]) for j in places])
            for h in range(4):
                scores = rows @ operands["query"][b, t, h].double()
                torch.testing.assert_close(out[b, t, h].double(), (scores * 0.3).softmax(0) @ rows[:, :6], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_count": 4096}, "sparse_count 4096; legal are 0 and 0, up to 64, and 1 to 2048"),
        ({"key_quant_mode": 1}, "quantisation modes 0 and 1"),
        ({"layout_key": "TND"}, "the CPU kernel knows 'BSND', 'PA_BSND' and 3"),
        ({"weights": torch.randn(2, 3, 4)}, "weights is .* torch.float32"),
        ({"key_dequant_scale": torch.randn(6, 8).half()}, r"key_dequant_scale is \(6, 8\)"),
    ],
)
def test_the_indexer_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        index(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mode": 0}, "legal are 2, 1, a power of two up to 128, and values that are the keys"),
        ({"key_quant_mode": 1}, "quantisation modes 1, 2 and 1"),
        ({"tile_size": 4}, "6 channels in tiles of 4"),
        ({"rope_head_dim": 4}, r"key is \(6, 8, 1, 18\)"),
    ],
)
def test_attention_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        attention(**changes)
