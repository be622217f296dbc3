"""models/index_cache.py: int8 keys choose as floats do, the rotation changes no score, and what a layer caches is by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.graphs import tree
from npucompile.models import index_cache, registry, sparse_latent_attention
from npucompile.models.quant.formats import INDEXERS, INT8, Formats
from npucompile.models.variant import PLAIN

EVERY, OF_INDEXERS = (("?*", INT8),), ((INDEXERS, INT8),)


def cached(random, rules):
    """A model that caches so, with its weights."""
    variant = replace(PLAIN, formats=Formats(kv_cache=rules))
    model = replace(random.model, config=replace(random.model.config, variant=variant))
    return model, oracle.join(model.family.abstract_params(model.config, torch.float32), random.theirs.state_dict())


@pytest.mark.parametrize("width", [128, 96, 10, 7])
def test_the_rotation_is_its_own_inverse_and_symmetric(width):
    matrix = index_cache.rotation(width)
    torch.testing.assert_close(matrix @ matrix, torch.eye(width))
    assert torch.equal(matrix, matrix.T)
    blocks = width & -width
    assert ((matrix != 0).sum(0) == blocks).all()


@pytest.mark.parametrize("name", ["sparse", "pairs", "shared-index"])
@pytest.mark.parametrize(("rules", "pools"), [(EVERY, {"packed", "index"}), (OF_INDEXERS, {"index"})], ids=["all", "indexers"])
@torch.no_grad()
def test_logits_are_nearly_those_of_floats(name, rules, pools):
    """Of as many tokens as an indexer chooses nothing but the latents' rounding shows; beyond, a few keys are others."""
    random = oracle.case(name)
    model, weights = cached(random, rules)
    rounded = {
        path.rpartition(".")[2] for path, aval in tree.flatten(model.state(oracle.LIMITS, torch.float32)) if aval.dtype == torch.int8
    }
    assert rounded == pools
    for tokens, most in ((9, 0.02 if "packed" in pools else 1e-4), (30, 0.3)):
        ids = random.prompt(tokens)
        last = random.logits(ids)[-1]
        logits = oracle.Runner(model, weights).prefill(ids, [3, 1, 2, 5], 0, [tokens])
        drift = (logits - last).square().mean().sqrt() / last.square().mean().sqrt()
        assert drift < most, (name, tokens, drift)
        assert "packed" not in pools or drift > 1e-5, "something was rounded"


def test_layers_that_a_checkpoint_leaves_float_have_neither_rotation_nor_scales():
    config = oracle.case("sparse").model.config
    named = replace(PLAIN, formats=Formats(kv_cache=(("model.layers.1.self_attn.indexer", INT8),)))
    config = replace(config, variant=named)
    for layer, rounded in ((0, False), (1, True)):
        prefix = f"model.layers.{layer}.self_attn."
        assert ("index_rotation" in sparse_latent_attention.params(config, torch.bfloat16, prefix)) == rounded
        pools = sparse_latent_attention.state(config, oracle.LIMITS, torch.bfloat16, prefix)
        assert ("index_scale" in pools) == rounded
        assert pools["index"].dtype == (torch.int8 if rounded else torch.bfloat16)
        assert "latent" in pools


def test_a_page_of_int8_is_near_half_of_one_of_floats():
    """GLM-5: 1,408 bytes a token, 1,282 where the indexer's keys alone are int8, 786 with the latents."""
    config = registry.find("glm-5").model.config
    sizes = []
    for rules in ((), OF_INDEXERS, EVERY):
        own = replace(config, variant=replace(PLAIN, formats=Formats(kv_cache=rules)))
        pools = sparse_latent_attention.state(own, oracle.LIMITS, torch.bfloat16, "model.layers.0.self_attn.")
        tokens = oracle.LIMITS.num_pages * oracle.LIMITS.page_size
        sizes.append(sum(aval.nbytes for aval in pools.values()) // tokens)
    assert sizes == [1408, 1282, 786]
