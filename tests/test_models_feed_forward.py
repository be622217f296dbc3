"""Feed-forward blocks, dense and mixture of experts, against transformers' modules."""

from __future__ import annotations

import pytest
import torch

from npucompile.models import feed_forward


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe", "moe-tied", "moe-one-expert"])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@torch.no_grad()
def test_blocks_equal_the_modules(oracle, name, tokens):
    random, config = oracle.case(name), oracle.case(name).model.config
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(tokens))
    module, weights = random.theirs.model.layers[1].mlp, random.weights["layers"][1]["mlp"]
    theirs = module(x[None])
    if config.num_experts:
        ours, routers = feed_forward.moe(config, weights, x)
        assert tuple(routers.shape) == (tokens, config.num_experts)
        torch.testing.assert_close(routers, x @ module.gate.weight.t(), atol=1e-5, rtol=1e-5)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    else:
        ours = feed_forward.dense(weights, x)
    torch.testing.assert_close(ours, theirs.view(ours.shape), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_nan_token_leaves_the_others_alone(oracle):
    random, config = oracle.case("moe"), oracle.case("moe").model.config
    x = torch.randn(6, config.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = random.weights["layers"][1]["mlp"]
    clean, _ = feed_forward.moe(config, weights, x)
    x[2] = float("nan")
    poisoned, _ = feed_forward.moe(config, weights, x)
    live = [0, 1, 3, 4, 5]
    torch.testing.assert_close(poisoned[live], clean[live], atol=1e-6, rtol=1e-6)
    assert poisoned[2].isnan().all()


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_split_undoes_join(oracle, name):
    config = oracle.case(name).model.config
    make = feed_forward.moe_params if config.num_experts else feed_forward.dense_params
    for what, param in make(config, torch.float32, "at.").items():
        parts = [torch.randn(shape) for shape in param.source.shapes]
        joined = param.source.join(*parts)
        assert tuple(joined.shape) == param.aval.shape, what
        assert all(torch.equal(a, b) for a, b in zip(param.source.split(joined), parts, strict=True)), what
