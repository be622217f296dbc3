"""models/eagle3.py: drafts are those of the published formulas over the whole text, and tokens those of the model without drafts."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from support import eagle, oracle, speculators
from transformers import LlamaConfig

from npucompile.graphs.errors import CheckpointError, ConfigError
from npucompile.models import eagle3
from npucompile.models.draft_model import DRAFT, PREFIX

EMBEDDING, OFFSETS = eagle3.EMBEDDING, eagle3.OFFSETS
IDS = "eagle_aux_hidden_state_layer_ids"

HEADS = {
    "dense": functools.partial(eagle.head, "plain"),
    "moe": functools.partial(eagle.head, "plain-moe", num_key_value_heads=1),
    "default taps": functools.partial(eagle.head, "plain-moe-some-dense", (2, 2, 2), eagle_config=None, head_dim=14),
    "inputs of two layers": functools.partial(eagle.head, "plain-tied", (0, 1), eagle_config=None, **{IDS: [0, 1]}),
    "normed residual": functools.partial(eagle.head, "plain", norm_before_residual=True),
    "another width": functools.partial(
        eagle.head, "plain", parts=(OFFSETS, EMBEDDING), hidden_size=28, target_hidden_size=44, eagle_config={IDS: [0, 0, 1]}
    ),
    "the model's vocabulary": functools.partial(eagle.head, "plain", parts=(), draft_vocab_size=97),
    "attention over latents": functools.partial(eagle.head, "equal-betas"),
    "projections with biases": functools.partial(eagle.head, "biased-raw-heads"),
    "a model with a head of its own": functools.partial(eagle.head, "next", (1, 2, 3), eagle_config={IDS: [0, 1, 2]}),
}


@functools.cache
def head(name):
    return HEADS[name]()


def truth(random, requests, tokens):
    """Outputs of programs without drafts, checked against transformers."""
    plain = [speculators.Request(request.prompt, request.request_slot) for request in requests]
    speculators.Server(random.model, random.weights, 0).serve(plain, tokens)
    for request in plain:
        theirs = random.logits([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        assert request.output == theirs.argmax(-1).tolist()
    return [request.output for request in plain]


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_drafts_are_those_of_the_published_formulas(name, drafts):
    """In three rows at every step, whatever was accepted before; tokens are those without drafts."""
    head_ = head(name)
    server = speculators.Server(head_.random.model, head_.random.weights, drafts)
    requests = [speculators.Request(head_.random.prompt(6 + 4 * i, i), i + 1) for i in range(3)]
    outputs_without = truth(head_.random, requests, 64 if drafts == 4 else 24)
    drafted, draw = [{} for _ in requests], random.Random(drafts)
    outputs, steps = server.prefill(requests, (8, 16)), 0
    while min(len(request.output) for request in requests) < len(outputs_without[0]) - drafts - 1 and steps < 40:
        for i, (request, row) in enumerate(zip(requests, outputs["drafts"].tolist(), strict=True)):
            drafted[i][request.start - 1] = row
            if steps % 3:
                server.plant_drafts(request, outputs_without[i], draw.randint(0, drafts))
        outputs, steps = server.decode(requests), steps + 1
    for i, request in enumerate(requests):
        assert request.output[: len(outputs_without[i])] == outputs_without[i][: len(request.output)]
        text = request.prompt + request.output
        # Every position in the first requests, a few in long ones: the formulas compute the whole text again for each draft.
        for base in list(drafted[i])[:: 1 + steps // 12]:
            assert drafted[i][base] == head_.drafts(text, base, drafts), f"request {i} after {base + 2} tokens"
    counts = {count for request in requests for count in request.counts}
    assert counts == set(range(1, drafts + 2)), "every number of drafts was accepted"


def test_drafts_are_tokens_of_the_heads_vocabulary():
    head_ = head("dense")
    legal = set((head_.tensors["d2t"] + torch.arange(41)).tolist())
    server, request = speculators.Server(head_.random.model, head_.random.weights, 3), speculators.Request([5, 9, 3], 1)
    assert set(server.prefill([request])["drafts"][0].tolist()) <= legal
    assert not legal >= set(range(97))


def test_default_taps_are_the_published_ones():
    """SpecForge's file for 94 layers says outputs of 1, 46 and 90, as it takes where a file says nothing."""
    values, target = eagle.settings(oracle.case("plain")), oracle.case("plain").model.config
    deep = target.__class__(**{**vars(target), "layer_kinds": ("dense",) * 94})
    named = {**values, "eagle_config": {IDS: [1, 46, 90], "use_aux_hidden_state": True}}
    inputs = {**values, "eagle_config": None, IDS: [2, 47, 91]}
    read = [eagle3.read_config(v, "config.json", deep, (OFFSETS,)).taps for v in (named, {**values, "eagle_config": None}, inputs)]
    assert read == [(2, 47, 91)] * 3


def test_fields_of_a_llamas_file_that_change_nothing_pass_and_its_base_is_the_default():
    """Published heads say how sparse decoders are, which have no experts, and leave the base of the rotation to the class."""
    values, target = eagle.settings(oracle.case("plain")), oracle.case("plain").model.config
    whole = {"decoder_sparse_step": 1, "use_sliding_window": False, "attn_implementation": "sdpa", "gradient_checkpointing": True}
    read = eagle3.read_config(values, "config.json", target, (OFFSETS,))
    assert eagle3.read_config(values | whole, "config.json", target, (OFFSETS,)) == read
    without = {name: value for name, value in values.items() if not name.startswith("rope")}
    assert eagle3.read_config(without, "config.json", target, (OFFSETS,)).rotary.theta == LlamaConfig().rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "change, parts, named",
    [
        ({"vocab_size": 98}, (OFFSETS,), "vocab_size is 98, and the model's vocab_size is 97"),
        ({"hidden_size": 28}, (OFFSETS,), "target_hidden_size is 28, and the model's hidden_size is 44"),
        ({"hidden_size": 28, "target_hidden_size": 44}, (OFFSETS,), "needs the tensor embed_tokens.weight"),
        ({}, (), "needs the tensor d2t"),
        ({"draft_vocab_size": 98}, (OFFSETS,), "draft_vocab_size must not exceed vocab_size"),
        ({"num_hidden_layers": 2}, (OFFSETS,), "num_hidden_layers is 2; supported is 1"),
        ({"fc_norm": True}, (OFFSETS,), "fc_norm is True"),
        ({"norm_output": False}, (OFFSETS,), "norm_output is False"),
        ({"attention_bias": True}, (OFFSETS,), "attention_bias is True"),
        ({"tie_word_embeddings": True}, (OFFSETS,), "tie_word_embeddings is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, (OFFSETS,), "use_aux_hidden_state is False"),
        ({"eagle_config": {"parallel": 2}}, (OFFSETS,), "eagle_config: parallel is 2"),
        ({"eagle_config": {IDS: [0, 3]}}, (OFFSETS,), "the model has 3 layers, expected a list of -1 to 2"),
        ({"eagle_config": None}, (OFFSETS,), "the model has 3 layers; legal without it are at least 4"),
        ({"num_key_value_heads": 3}, (OFFSETS,), "num_attention_heads must be a multiple of num_key_value_heads"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(change, parts, named):
    random = oracle.case("plain")
    with pytest.raises(ConfigError) as error:
        eagle3.read_config(eagle.settings(random, **change), "config.json", random.model.config, parts)
    assert named in str(error.value)


def test_ids_outside_the_models_vocabulary_are_refused():
    model = head("dense").random.model
    param = model.family.abstract_params(model.config, torch.float32)[DRAFT]["model_ids"]
    assert param.source.names == (PREFIX + OFFSETS,)
    with pytest.raises(CheckpointError, match="maps to the id 97; the model's vocabulary has 97"):
        param.source.join(torch.cat([torch.zeros(40), torch.tensor([97 - 40])]).to(torch.int64))
    ids = torch.arange(41, dtype=torch.int32) * 2
    assert torch.equal(param.source.join(*param.source.split(ids)), ids)
