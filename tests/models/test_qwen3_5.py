"""models/qwen3_5.py: the model functions equal transformers, for every kind of layer, and the draft head equals MtpLayer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import ConfigError
from npucompile.graphs.types import Bucket
from npucompile.models import qwen3_5
from npucompile.models.presets import BUNDLED
from npucompile.models.variant import Variant

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
    hidden, _, intermediates = qwen3_5.forward(config, random.weights, state, oracle.inputs(bucket, rows))
    ours = qwen3_5.head(config, random.weights, hidden).view(4, 40, -1)
    for row, ids in zip(ours, prompts, strict=False):
        assert (row[: len(ids)] - random.logits(ids)).abs().max() < TOLERANCE
    assert intermediates.features is hidden, "the draft head reads the hidden states of the head"
    layers = len(config.layer_types) if config.num_experts else 0
    assert [tuple(r.shape) for r in intermediates.routers] == [(160, config.num_experts)] * layers


@pytest.mark.parametrize("name", ["dense", "moe"])
@torch.no_grad()
def test_router_logits_are_those_of_transformers(name):
    random, ids = oracle.case(name), oracle.case(name).prompt(16)
    state = oracle.poisoned(random.model.state(oracle.LIMITS, torch.float32))
    rows = oracle.inputs(Bucket("prefill", 1, 16), [oracle.Row(ids, 0, [1, 2], 1, [1])])
    ours = qwen3_5.forward(random.model.config, random.weights, state, rows)[2].routers
    theirs = random.theirs(torch.tensor([ids]), output_router_logits=True).router_logits if name == "moe" else ()
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b.view(a.shape)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "moe"])
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
    hidden, _, _ = qwen3_5.forward(random.model.config, weights, state, oracle.inputs(Bucket("prefill", 4, 48), rows))
    assert hidden.dtype == torch.bfloat16
    ours = qwen3_5.head(random.model.config, weights, hidden).view(exact.shape)
    error = (ours - exact).square().mean().sqrt()
    their_error = (theirs(torch.tensor(prompts)).logits.float() - exact).square().mean().sqrt()
    assert error < 1.25 * their_error
    assert error < 0.1 * exact.std()


class Draft:
    """A model's draft head, as MtpLayer and as `extend_draft_cache` and `draft` on poisoned pools."""

    def __init__(self, name):
        self.random = oracle.drafting(name)
        self.config, self.weights, self.theirs = self.random.model.config, self.random.weights, self.random.head
        self.state = oracle.poisoned(qwen3_5.abstract_state(self.config, oracle.LIMITS, torch.float32))

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
        fused, self.state = qwen3_5.extend_draft_cache(self.config, self.weights, self.state, inputs, hidden, first=bucket.q_len > 1)
        out = qwen3_5.draft(self.config, self.weights, self.state, inputs, fused)
        return out.view(bucket.batch, bucket.q_len, -1)


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe", "moe-tied", *BUNDLED])
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


@pytest.mark.parametrize("name", ["dense", "moe", *BUNDLED])
def test_sources_of_the_draft_head_name_every_tensor_of_mtp_layer(name):
    random = oracle.drafting(name)
    params = qwen3_5.abstract_params(random.model.config, torch.float32)["mtp"]
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
    head = qwen3_5.abstract_params(config, torch.bfloat16)["mtp"]
    return [(path, param.aval) for path, param in tree.flatten(head)]


@pytest.mark.parametrize("name", CASES)
def test_sources_name_every_tensor_of_transformers_once(name):
    """Split is the inverse of join, so a saved checkpoint equals the loaded one."""
    random = oracle.case(name)
    theirs = dict(random.theirs.state_dict())
    if random.model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    params = qwen3_5.abstract_params(random.model.config, torch.float32)
    assert [tuple(t.shape) for _, t in tree.flatten(random.weights)] == [p.aval.shape for _, p in tree.flatten(params)]
    ours = oracle.split(params, random.weights)
    assert set(ours) == set(theirs)
    for tensor_name, tensor in ours.items():
        assert torch.equal(tensor, theirs[tensor_name]), tensor_name
    assert {n: shape for _, p in tree.flatten(params) for n, shape in zip(p.source.names, p.source.shapes, strict=True)} == {
        n: tuple(t.shape) for n, t in theirs.items()
    }


def test_state_is_one_pool_a_layer():
    config = dataclasses.replace(oracle.case("dense").model.config, mtp_num_hidden_layers=1)
    state = qwen3_5.abstract_state(config, oracle.LIMITS, torch.bfloat16)
    assert [sorted(pools) for pools in state["layers"]] == [["conv", "delta"]] * 3 + [["k", "v"]]
    assert sorted(state["mtp"]) == ["k", "v"]
    shapes = {path: (aval.shape, aval.dtype) for path, aval in tree.flatten(state)}
    assert shapes["layers.0.conv"] == ((13, 3, 2 * 2 * 8 + 4 * 12), torch.bfloat16)
    assert shapes["layers.0.delta"] == ((13, 4, 12, 8), torch.float32)
    assert shapes["layers.3.k"] == shapes["mtp.v"] == ((41, 8, 1, 18), torch.bfloat16)


def test_layer_types_follow_the_interval_when_they_are_absent():
    values = {**oracle.CASES["moe"], "num_hidden_layers": 7, "layer_types": None, "full_attention_interval": 3}
    kinds = qwen3_5.Config.from_hf(values).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [2, 5]


def test_wrapped_and_older_configurations_read_the_same():
    values = oracle.CASES["dense"]
    plain = qwen3_5.Config.from_hf(values)
    assert qwen3_5.Config.from_hf({"text_config": values, "vision_config": {"depth": 3}}) == plain
    older = {key: value for key, value in values.items() if key != "rope_parameters"}
    older.update(rope_theta=10000, partial_rotary_factor=0.25, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 0]})
    assert qwen3_5.Config.from_hf(older) == plain


@pytest.mark.parametrize(
    "change, named",
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"head_dim": "16"}, "head_dim is '16'; expected int"),
        ({"hidden_size": 0}, "hidden_size is 0; expected at least 1"),
        ({"hidden_size": True}, "hidden_size is True; expected int"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'; expected float"),
        ({"num_key_value_heads": 2}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads"),
        ({"layer_types": ["full_attention"]}, "expected 4 of 'full_attention' and 'linear_attention'"),
        ({"layer_types": [{}, {}, {}, {}]}, "layer_types is"),
        ({"layer_types": ["mamba"] * 4}, "layer_types is"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000; expected at most 1024"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; supported is 'swish' or 'sigmoid'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True; supported is False"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 0 or 1"),
        ({"rope_parameters": []}, "rope_parameters is []; expected an object"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters: rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "head_dim * partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": math.inf}}, "partial_rotary_factor is inf"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling: type is 'dynamic'"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, "must not exceed"),
    ],
)
def test_a_malformed_configuration_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        qwen3_5.Config.from_hf({**oracle.CASES["dense"], **change})
    assert named in str(error.value)
