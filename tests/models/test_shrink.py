"""models/shrink.py: small configurations of every family have a share of everything on each device, as the large ones have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.ops.sample import part_length
from npucompile.graphs.steps.inputs import MAX_RANKED
from npucompile.graphs.types import Mesh
from npucompile.models import registry, shrink
from npucompile.models.head_padding import copies, grouped
from npucompile.models.variant import Variant
from npucompile.tools.builder.deployments import deployments

FULL, LINEAR = "full_attention", "linear_attention"
MOE = "qwen3.5-397b"
PLACES = sorted(
    {(row.model, str(phase.mesh)) for row in deployments().values() if row.model in registry.presets() for phase in row.phases.values()}
)


def large(name, mesh, **variant):
    config = registry.find(name).model.config
    copies = max(1, mesh.axis("tp") // config.num_key_value_heads)
    return replace(config, variant=Variant(kv_repeat=copies, **variant))


@pytest.mark.parametrize(
    ("name", "mesh"), [*PLACES, (MOE, "dp=1,tp=16"), (MOE, "dp=32,tp=2"), ("qwen3.5-27b", "tp=2"), (MOE, "1"), ("qwen3-0.6b", "tp=4")]
)
def test_every_device_has_a_small_share_of_what_it_has_a_large_share_of(name, mesh):
    at = Mesh.parse(mesh)
    family, before = registry.find(name).model.family, large(name, at)
    after, tp = family.shrink(before, at.axis("tp"), at.size), at.axis("tp")
    for heads in after.split_heads.values():
        assert 1 <= heads / tp <= 4
        assert heads % tp == 0
    assert (after.num_key_value_heads < tp) == (before.num_key_value_heads < tp)
    assert after.num_key_value_heads * after.variant.kv_repeat % tp == 0
    assert (after.num_attention_heads > after.num_key_value_heads * after.variant.kv_repeat) == (
        before.num_attention_heads > before.num_key_value_heads * before.variant.kv_repeat
    )
    assert after.vocab_size % tp == 0
    assert after.vocab_size % 32 == 0
    assert after.vocab_size <= 512 if before.vocab_size <= MAX_RANKED else MAX_RANKED < after.vocab_size <= MAX_RANKED + 32 * tp
    assert (after.num_experts > 0) == (before.num_experts > 0)
    if before.num_experts:
        assert after.num_experts % at.size == 0
        assert after.num_experts >= 2 * at.size or at.size == 1
        assert 1 <= after.num_experts_per_tok < after.num_experts
    assert all(width % 8 == 0 for width in (after.hidden_size, after.moe_intermediate_size, after.intermediate_size))
    # The rotary part of latent attention is a head of its own.
    assert after.rotary.dim / getattr(after, "head_dim", after.rotary.dim) == before.rotary.dim / getattr(
        before, "head_dim", before.rotary.dim
    )
    assert after.layer_kinds in (before.layer_kinds[: shrink.layers(before.layer_kinds)], shrink.runs(before.layer_kinds))
    assert set(after.layer_kinds) == set(before.layer_kinds)
    assert (after.num_moe_layers > 0) == (before.num_moe_layers > 0)
    assert (after.rotary.theta, after.rms_norm_eps, after.variant) == (before.rotary.theta, before.rms_norm_eps, before.variant)


@pytest.mark.parametrize(
    ("kinds", "small"),
    [
        ((LINEAR, LINEAR, LINEAR, FULL) * 15, (LINEAR, LINEAR, LINEAR, FULL)),
        ((LINEAR, FULL) * 8, (LINEAR, FULL) * 2),
        ((LINEAR, LINEAR, FULL) * 8, (LINEAR, LINEAR, FULL) * 2),
        ((FULL,) * 64, (FULL,) * 4),
        ((LINEAR, FULL), (LINEAR, FULL)),
        ((LINEAR,) * 9 + (FULL,) + (LINEAR,) * 9, (LINEAR,) * 8),
    ],
)
def test_layers_keep_their_period(kinds, small):
    assert kinds[: shrink.layers(kinds)] == small


@pytest.mark.parametrize(
    ("kinds", "small"),
    [
        (("dense",) * 3 + ("moe",) * 58, ("dense", "moe", "moe")),
        (("moe",) * 9, ("moe", "moe")),
        (("moe",), ("moe",)),
        (("dense", "moe"), ("dense", "moe")),
        (("dense", "moe", "dense", "moe"), ("dense", "moe", "dense", "moe")),
        (("dense",) * 3 + ("shared", "shared", "moe") * 9 + ("shared",), ("dense", "shared", "moe", "shared")),
    ],
)
def test_of_runs_one_layer_is_left_and_two_of_the_last(kinds, small):
    assert shrink.runs(kinds) == small


@pytest.mark.parametrize("size", [40, 257, 260, 261, 512, 151_643, 151_936, 248_320])
@pytest.mark.parametrize("tp", [1, 2, 4, 12, 16, 64])
def test_a_small_vocabulary_is_ranked_shared_masked_and_drawn_from_as_the_large_one(size, tp):
    small = shrink.vocabulary(size, tp)
    assert (small > MAX_RANKED) == (size > MAX_RANKED) or size <= MAX_RANKED < 8 * tp
    assert (small % tp == 0, small % 32 == 0) == (size % tp == 0, size % 32 == 0)
    assert -(-small // tp) * (tp - 1) < small
    assert small <= MAX_RANKED + 64 * tp
    assert size < small or len({part_length(count) in (1, count) for count in (size, small)}) == 1


@pytest.mark.parametrize(("queries", "keys", "tp"), [(6, 3, 2), (6, 3, 4), (10, 5, 4), (6, 2, 4), (20, 5, 4), (12, 3, 8), (4, 2, 3)])
def test_heads_that_are_padded_are_padded_in_a_small_model_too(queries, keys, tp):
    times = copies(keys, tp)
    small_queries, small_keys = shrink.attention_heads(queries, keys, times, tp)
    large, small = ({heads.kind for heads in grouped(*each, tp)} for each in ((queries, keys), (small_queries, small_keys)))
    assert small == large
    assert copies(small_keys, tp) == times
    assert shrink.split(3 * tp - 1, tp) % tp == tp - 1
