"""models/decoder.py: models made of it equal transformers, for every family and kind of layer."""

from __future__ import annotations

import pytest
import torch
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.types import Bucket
from npucompile.models.quant.description import canonical

CASES = list(oracle.CASES)
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_of_every_token_equal_transformers(name):
    """Three rows of a prefill bucket of 40: full, shorter, and half a chunk of the delta rule."""
    random, config = oracle.case(name), oracle.case(name).model.config
    prompts = [random.prompt(40, 1), random.prompt(23, 2), random.prompt(5, 3)]
    rows = [oracle.Row(ids, 0, list(range(1 + 5 * i, 6 + 5 * i)), 1 + i, [1 + i]) for i, ids in enumerate(prompts)]
    bucket = Bucket("prefill", 4, 40)
    state = oracle.poisoned(random.model.state(oracle.LIMITS, torch.float32))
    hidden, _, intermediates = random.model.family.forward(config, random.weights, state, oracle.inputs(bucket, rows))
    ours = random.model.family.head(config, random.weights, hidden).view(4, 40, -1)
    for row, ids in zip(ours, prompts, strict=False):
        assert (row[: len(ids)] - random.logits(ids)).abs().max() < TOLERANCE
    assert intermediates.features is hidden, "the draft head reads the hidden states of the head"
    layers = sum("router" in layer["mlp"] for layer in random.weights["layers"])
    assert [tuple(r.shape) for r in intermediates.routers] == [(160, config.num_experts)] * layers


@pytest.mark.parametrize("name", ["dense", "moe", "next", "plain", "plain-moe", "plain-moe-some-dense"])
@torch.no_grad()
def test_router_logits_are_those_of_transformers(name):
    random, config, ids = oracle.case(name), oracle.case(name).model.config, oracle.case(name).prompt(16)
    state = oracle.poisoned(random.model.state(oracle.LIMITS, torch.float32))
    rows = oracle.inputs(Bucket("prefill", 1, 16), [oracle.Row(ids, 0, [1, 2], 1, [1])])
    ours = random.model.family.forward(config, random.weights, state, rows)[2].routers
    theirs = random.theirs(torch.tensor([ids]), output_router_logits=True).router_logits if config.num_experts else ()
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b.view(a.shape)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "moe", "plain", "plain-moe"])
@torch.no_grad()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name):
    """Stated tolerance: the root mean square error of the logits is at most 1.25 times transformers' own, and 0.1 of their spread."""
    random = oracle.case(name)
    prompts = [random.prompt(48, seed) for seed in range(4)]
    exact = torch.stack([random.logits(ids) for ids in prompts])
    theirs = oracle.build(random.values).theirs.bfloat16()
    for layer in theirs.model.layers:
        if hasattr(layer, "linear_attn"):  # as the files store them, and as we keep them
            layer.linear_attn.A_log.data = layer.linear_attn.A_log.data.float()
            layer.linear_attn.dt_bias.data = layer.linear_attn.dt_bias.data.float()
    params = random.model.params(torch.bfloat16)
    rows = [oracle.Row(ids, 0, list(range(1 + 6 * i, 7 + 6 * i)), 1 + i, [1 + i]) for i, ids in enumerate(prompts)]
    state = oracle.poisoned(random.model.state(oracle.LIMITS, torch.bfloat16))
    weights = oracle.cast({key: random.weights[key] for key in params}, params)
    hidden, _, _ = random.model.family.forward(random.model.config, weights, state, oracle.inputs(Bucket("prefill", 4, 48), rows))
    assert hidden.dtype == torch.bfloat16
    ours = random.model.family.head(random.model.config, weights, hidden).view(exact.shape)
    error = (ours - exact).square().mean().sqrt()
    their_error = (theirs(torch.tensor(prompts)).logits.float() - exact).square().mean().sqrt()
    assert error < 1.25 * their_error
    assert error < 0.1 * exact.std()


@pytest.mark.parametrize("name", CASES)
def test_sources_name_every_tensor_of_transformers_once(name):
    """Split is the inverse of join, so a saved checkpoint equals the loaded one."""
    random = oracle.case(name)
    theirs = {canonical(key): tensor for key, tensor in random.theirs.state_dict().items()}
    if random.model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    params = oracle.declared(random.model)
    assert [tuple(t.shape) for _, t in tree.flatten(random.weights)] == [p.aval.shape for _, p in tree.flatten(params)]
    ours = oracle.split(params, random.weights)
    assert set(ours) == set(theirs)
    for tensor_name, tensor in ours.items():
        assert torch.equal(tensor, theirs[tensor_name]), tensor_name
    assert {n: shape for _, p in tree.flatten(params) for n, shape in zip(p.source.names, p.source.shapes, strict=True)} == {
        n: tuple(t.shape) for n, t in theirs.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_join_orders_a_column_as_it_orders_the_matrix(name):
    """So that the same join orders the scales [N, 1] of a quantised matrix."""
    random = oracle.case(name)
    for layer in random.model.family.abstract_params(random.model.config, torch.float32)["layers"]:
        for what, param in layer["mixer"].items():
            if any(len(shape) != 2 for shape in param.source.shapes):
                continue
            tensors = [torch.randn(shape) for shape in param.source.shapes]
            columns = [tensor[:, 3:4] for tensor in tensors]
            joined = param.source.join(*columns)
            assert torch.equal(joined, param.source.join(*tensors)[..., 3:4]), what
            assert all(torch.equal(a, b) for a, b in zip(param.source.split(joined), columns, strict=True)), what
