"""tools/ranks/random_weights.py: ranks that hold the same part draw the same values; sizes keep activations finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.types import Aval, Leaf
from npucompile.tools.ranks.random_weights import random_leaf, random_params

SPLIT, WHOLE = Leaf("params.w", Aval((8, 4), torch.float32, ("q_heads", None))), Leaf("params.norm", Aval((4,), torch.float32, (None,)))


def test_replicas_are_equal_and_shards_are_not():
    manifest = SimpleNamespace(mesh="dp=2,tp=2", rules={"q_heads": ("tp",)}, params=(SPLIT, WHOLE))
    ranks = [dict(random_params(SimpleNamespace(manifest=manifest), rank)(("params.w", "params.norm"))) for rank in range(4)]
    assert [tuple(own["params.w"].shape) for own in ranks] == [(4, 4)] * 4
    assert torch.equal(ranks[0]["params.w"], ranks[2]["params.w"])
    assert not torch.equal(ranks[0]["params.w"], ranks[1]["params.w"])
    assert all(torch.equal(own["params.norm"], ranks[0]["params.norm"]) for own in ranks)


@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        ("w", torch.bfloat16, -1, 1),
        ("w", torch.int8, -127, 127),
        ("scale", torch.float32, 0.002, 0.004),
        ("post_norm", torch.float32, 0, 2.5),
    ],
)
def test_values_have_the_size_of_weights(name, dtype, low, high):
    shape = (64,) if "norm" in name else (16, 64)
    leaf = Leaf(f"params.{name}", Aval(shape, dtype, (None,) * len(shape)))
    value = random_leaf(leaf, leaf.aval, 1)
    assert value.dtype == dtype
    assert low <= float(value.float().min()) < float(value.float().max()) <= high


def test_scales_in_64_bits_hold_a_float():
    leaf = Leaf("params.scale", Aval((2, 4), torch.int64, (None, None)))
    assert 0.002 <= float(random_leaf(leaf, leaf.aval, 0).to(torch.int32).view(torch.float32).min()) <= 0.004


def test_ids_are_rows_of_every_table():
    leaf = Leaf("params.draft.model_ids", Aval((5,), torch.int32, (None,)))
    assert random_leaf(leaf, leaf.aval, 0).tolist() == [0, 1, 2, 3, 4]
