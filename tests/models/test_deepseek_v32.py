"""models/deepseek_v32.py: fields of the indexer are read and checked; equality with transformers is in test_decoder.py."""

from __future__ import annotations

from support import oracle

from npucompile.models import deepseek_v3, deepseek_v32, registry
from npucompile.tools.prove.small_model import CHUNK_TOKENS


def test_it_is_a_v3_with_an_indexer():
    config = deepseek_v32.read_config(oracle.CASES["sparse"])
    assert (config.index_topk, config.index_head_dim, config.index_n_heads) == (9, 10, 20)
    plain = deepseek_v3.read_config({name: value for name, value in oracle.CASES["sparse"].items() if name not in oracle.SPARSE})
    assert all(getattr(config, name) == value for name, value in vars(plain).items())


def test_a_small_model_has_longer_prompts_than_the_keys_that_it_chooses():
    before = registry.find("deepseek-v3.2").model.config
    after = deepseek_v32.shrink(before, 4, 32)
    assert (before.index_topk, after.index_topk) == (2048, 64)
    assert 3 * after.index_topk <= CHUNK_TOKENS
    # A score of zero needs that all heads give none, and then keys would tie.
    assert after.index_n_heads >= 20
