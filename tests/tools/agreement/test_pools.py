"""tools/agreement/pools.py: a pool is known by the axes of its leaf, and cached values fit its dtype."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.ops.packed_latents import packed_axis, packed_width, unpacked
from npucompile.graphs.types import Aval, Leaf
from npucompile.tools.agreement.pools import (
    random_cache,
    unread_value,
)

KEYS = Leaf("state.layers.0.k", Aval((5, 4, 2, 3), torch.int8, ("pages", None, "kv_heads", None)))
SCALES = Leaf("state.layers.0.scale", Aval((5, 2, 4), torch.float32, ("pages", "kv_heads", None)))
PACKED = Leaf(
    "state.layers.0.packed",
    Aval((5, 4, 1, packed_width(32, 16, torch.bfloat16)), torch.int8, ("pages", None, None, packed_axis(32, torch.bfloat16))),
)
KEY_SCALES = Leaf("state.layers.0.index_scale", Aval((5, 4, 1), torch.float16, ("pages", None, None)))
STATE = Leaf("state.layers.1.s", Aval((5, 3), torch.bfloat16, ("slots", None)))
FIRST = Leaf("state.layers.1.conv", Aval((5, 3), torch.float32, ("first_slots", None)))
REQUESTS = Leaf("state.request_slots", Aval((5, 3), torch.int32, ("request_slots", None)))


@pytest.mark.parametrize("leaf", [KEYS, SCALES, STATE], ids=lambda leaf: leaf.path)
def test_cached_values_are_never_what_fills_unread_places(leaf):
    values = random_cache(leaf, (4, 64), torch.Generator().manual_seed(0))
    assert bool(values.isfinite().all())
    assert not bool((values == unread_value(leaf)).any())
    assert float(values.abs().amax()) <= (127 if leaf is KEYS else 2 / 127 if leaf is SCALES else 6)


def test_packed_rows_are_latents_and_rotary_parts_of_about_one():
    rows = random_cache(PACKED, (6, 1, PACKED.aval.shape[-1]), torch.Generator().manual_seed(0))
    latents, rotary = unpacked(rows, 32, torch.bfloat16)
    assert (latents.shape, rotary.shape) == ((6, 1, 32), (6, 1, 16))
    assert 0.5 < float(latents.float().std()) < 2
    assert 0.5 < float(rotary.float().std()) < 2
    scales = random_cache(KEY_SCALES, (6, 1), torch.Generator().manual_seed(0))
    assert scales.dtype == torch.float16
    assert bool((scales > 0).all())
