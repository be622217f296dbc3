"""graphs/ops/quant_cache_write.py: each written number is within half a step of its integer times its scale; the rest stays."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs import ops
from npucompile.graphs.primitive import TABLE

SIZES = st.integers(1, 5)


def drawn(draw: st.DataObject) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Slots [T] that differ, and keys, values [T, G, D] of any size, among them zeros."""
    pages, P, G, D = (draw.draw(SIZES) for _ in range(4))
    slots = draw.draw(st.lists(st.integers(0, pages * P - 1), unique=True, min_size=1))
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 99)))
    rows = [torch.randn(len(slots), G, D, generator=generator) * 10.0 ** draw.draw(st.integers(-4, 4)) for _ in range(2)]
    rows[0][0] = 0
    return torch.tensor(slots, dtype=torch.int32), torch.tensor([pages, P, G, D]), rows


@given(st.data())
def test_a_scale_of_each_token_and_head(data: st.DataObject) -> None:
    slots, sizes, (k, v) = drawn(data)
    pages, P, G, D = sizes.tolist()
    pools = [torch.full((pages, P, G, D), 99, dtype=torch.int8) for _ in range(2)] + [torch.full((pages, G, P), 7.0) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    new = ops.quant_cache_write(*pools, k, v, slots)
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True)), "a functional write leaves its operands"
    for cache, scale, x in zip(new[:2], new[2:], (k, v), strict=True):
        step = scale.transpose(1, 2).flatten(0, 1)[slots.long()][..., None]
        assert torch.allclose(step.squeeze(-1), x.abs().amax(-1) / 127)
        assert bool(((cache.flatten(0, 1)[slots.long()] * step - x).abs() <= step * 0.5001).all())
    untouched = torch.ones(pages * P, dtype=torch.bool).index_fill(0, slots.long(), False)
    assert bool((new[0].flatten(0, 1)[untouched] == 99).all())
    assert bool((new[2].transpose(1, 2).flatten(0, 1)[untouched] == 7).all())
    TABLE["quant_cache_write"].rule("inplace")(*pools, k, v, slots)
    assert all(torch.equal(pool, result) for pool, result in zip(pools, new, strict=True))


@given(st.data())
def test_a_scale_of_each_channel(data: st.DataObject) -> None:
    slots, sizes, (k, v) = drawn(data)
    pages, P, G, D = sizes.tolist()
    pools = [torch.full((pages, P, G, D), 99, dtype=torch.int8) for _ in range(2)]
    scales = [x.abs().amax(0).clamp(min=1e-6) / 127 for x in (k, v)]
    new = ops.static_cache_write(*pools, k, v, *scales, slots)
    for cache, scale, x in zip(new, scales, (k, v), strict=True):
        assert bool(((cache.flatten(0, 1)[slots.long()] * scale - x).abs() <= scale * 0.501).all())
    TABLE["static_cache_write"].rule("inplace")(*pools, k, v, *scales, slots)
    assert all(torch.equal(pool, result) for pool, result in zip(pools, new, strict=True))
    far = ops.static_cache_write(*pools, k, v, *(scale / 3 for scale in scales), slots)
    assert int(far[1].flatten(0, 1)[slots.long()].abs().max()) <= 128, "values beyond the scale's range are clamped, not wrapped"
