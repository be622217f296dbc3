"""graphs/ops/quant_paged_attention.py: int8 pages stand for integers times their scales, within half a step of what was written."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.primitive import TABLE

P, G, D, H = 4, 2, 8, 4


def written(kind: str, tokens: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], ...]:
    """Keys and values [tokens, G, D], and pools and scales after they were written to the pages 1, 2, ... in order."""
    k, v = (torch.randn(tokens, G, D, generator=generator).to(dtype) for _ in range(2))
    pages, slots = 1 + -(-tokens // P), torch.arange(P, P + tokens, dtype=torch.int32)
    pools = [torch.full((pages, P, G, D), -128, dtype=torch.int8) for _ in range(2)]
    if kind == "static":
        scales = [x.float().abs().amax(0) / 127 for x in (k, v)]
        return [k, v], list(ops.static_cache_write(*pools, k, v, *scales, slots)), scales
    scales = [torch.full((pages, G, P), float("nan")) for _ in range(2)]
    *pools, k_scale, v_scale = ops.quant_cache_write(*pools, *scales, k, v, slots)
    return [k, v], pools, [k_scale, v_scale]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["", "static_"])
def test_equals_attention_over_dequantised_pages(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    _, pools, scales = written(kind.rstrip("_"), 14, generator, dtype)
    place = [torch.tensor(x, dtype=torch.int32) for x in ([[1, 2, 3, 4], [4, 3, 2, 1], [0, 0, 0, 0]], [11, 0, 0], [3, 1, 0])]
    q = torch.randn(3, 3, H, D, generator=generator).to(dtype)
    factors = [scale if kind else scale.transpose(1, 2)[..., None] for scale in scales]
    floats = [(pool.float() * factor).to(dtype) for pool, factor in zip(pools, factors, strict=True)]
    want = ops.paged_attention(q, *floats, *place, 0.3)
    primitive = TABLE[f"{kind}quant_paged_attention"]
    operands = (q, *pools, *scales, *place, 0.3)
    for got in (primitive(*operands), primitive.lower_for("inductor")(*operands)):
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1, :1], want[1, :1], rtol=1e-5, atol=1e-5)
