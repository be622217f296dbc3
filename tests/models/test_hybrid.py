"""models/hybrid.py: the draft head equals MtpLayer, and pools and parameters are what layers of two kinds have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.types import Bucket
from npucompile.models import hybrid
from npucompile.models.presets import BUNDLED
from npucompile.models.variant import Variant

TOLERANCE = 1e-4


class Draft:
    """A model's draft head, as MtpLayer and as `extend_draft_cache` and `draft` on poisoned pools."""

    def __init__(self, name):
        self.random = oracle.drafting(name)
        self.config, self.weights, self.theirs = self.random.model.config, self.random.weights, self.random.head
        self.state = oracle.poisoned(hybrid.abstract_state(self.config, oracle.LIMITS, torch.float32))

    def reference(self, ids, hidden):
        """[n, M] of the draft layer over ids[i] beside hidden[i], at the positions of the ids: i + 1, as transformers counts."""
        model, n = self.random.theirs.model, len(ids)
        embeds = model.embed_tokens(torch.tensor([ids]))
        positions = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        angles = model.rotary_emb(embeds, positions)
        return self.theirs(embeds, hidden[None], angles, mask, positions, None)[0]

    def run(self, bucket, rows, hidden):
        """Hidden states [B, Q, M] of our draft head for all rows of a bucket, which also extend its cache."""
        inputs = oracle.inputs(bucket, rows)
        fused, self.state = hybrid.extend_draft_cache(self.config, self.weights, self.state, inputs, hidden, first=bucket.q_len > 1)
        out = hybrid.draft(self.config, self.weights, self.state, inputs, fused)
        return out.view(bucket.batch, bucket.q_len, -1)


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe", "moe-tied", "next", "next-raw", *BUNDLED])
@torch.no_grad()
def test_draft_head_equals_mtp_layer_and_recurses(name):
    """Two prompts in a padded prefill; then two draft steps, each fed the hidden state and the token of the one before."""
    head = Draft(name)
    prompts = [head.random.prompt(12, 1), head.random.prompt(7, 2)]
    hiddens = [head.random.theirs.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    shifted = [[*ids[1:], 3 + i] for i, ids in enumerate(prompts)]
    pages = [[4, 2], [9, 1]]
    fed = torch.full((3, 12, head.config.hidden_size), float("nan"))
    for b, hidden in enumerate(hiddens):
        fed[b, : len(hidden)] = hidden
    rows = [oracle.Row(ids, 0, pages[b]) for b, ids in enumerate(shifted)]
    out = head.run(Bucket("prefill", 3, 12), rows, fed.flatten(0, 1))
    expected = [head.reference(ids, hidden) for ids, hidden in zip(shifted, hiddens, strict=True)]
    for b, want in enumerate(expected):
        assert (out[b, : len(want)] - want).abs().max() < TOLERANCE
    for token in (11, 19):
        last = torch.stack([*(want[-1] for want in expected), torch.full_like(fed[0, 0], float("nan"))])
        rows = [oracle.Row([token + b], len(shifted[b]), pages[b]) for b in range(2)]
        out = head.run(Bucket("decode", 3, 1), rows, last)
        for b in range(2):
            shifted[b], hiddens[b] = [*shifted[b], token + b], torch.cat([hiddens[b], expected[b][-1:]])
            expected[b] = head.reference(shifted[b], hiddens[b])
            assert (out[b, 0] - expected[b][-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "moe", "next", *BUNDLED])
def test_sources_of_the_draft_head_name_every_tensor_of_mtp_layer(name):
    random = oracle.drafting(name)
    params = hybrid.abstract_params(random.model.config, torch.float32)["mtp"]
    sizes = {name: shape for _, p in tree.flatten(params) for name, shape in zip(p.source.names, p.source.shapes, strict=True)}
    theirs = {".".join((oracle.HEAD[n.partition(".")[0]], n.partition(".")[2])): t.shape for n, t in random.head.state_dict().items()}
    assert sizes == {f"mtp.{name}": tuple(shape) for name, shape in theirs.items()}


@torch.no_grad()
def test_draft_head_leaves_the_layers_pools_alone():
    head = Draft("dense")
    layers = head.state["layers"]
    head.run(Bucket("decode", 1, 1), [oracle.Row([5], 0, [1])], torch.zeros(1, head.config.hidden_size))
    assert head.state["layers"] is layers


def test_the_draft_head_is_never_quantised():
    """Under any quantisation the head's layer has floating-point parameters, though its experts may be grouped."""
    plain = dataclasses.replace(oracle.case("moe").model.config, mtp_num_hidden_layers=1)
    for experts in ("plain", "grouped", "w4a8"):
        for attention in ("plain", "w8a8"):
            quantised = dataclasses.replace(plain, variant=Variant(attention=attention, experts=experts))
            unquantised = dataclasses.replace(plain, variant=Variant(experts="plain" if experts == "plain" else "grouped"))
            avals = [avals_of(config) for config in (quantised, unquantised)]
            assert avals[0] == avals[1], (experts, attention)


def avals_of(config):
    head = hybrid.abstract_params(config, torch.bfloat16)["mtp"]
    return [(path, param.aval) for path, param in tree.flatten(head)]


def test_state_is_one_pool_a_layer():
    config = dataclasses.replace(oracle.case("dense").model.config, mtp_num_hidden_layers=1)
    state = hybrid.abstract_state(config, oracle.LIMITS, torch.bfloat16)
    assert [sorted(pools) for pools in state["layers"]] == [["conv", "delta"]] * 3 + [["k", "v"]]
    assert sorted(state["mtp"]) == ["k", "v"]
    shapes = {path: (aval.shape, aval.dtype) for path, aval in tree.flatten(state)}
    assert shapes["layers.0.conv"] == ((13, 3, 2 * 2 * 8 + 4 * 12), torch.bfloat16)
    assert shapes["layers.0.delta"] == ((13, 4, 12, 8), torch.float32)
    assert shapes["layers.3.k"] == shapes["mtp.v"] == ((41, 8, 1, 18), torch.bfloat16)
