"""models/family.py: a family is all that programs need; an EAGLE-3 head, which reads features of other layers, drafts too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support import oracle, speculators, unrolled

from npucompile.graphs import ops, tree
from npucompile.graphs.types import Aval
from npucompile.models import attention, feed_forward, hybrid, qwen3_5, sequence_parallel, step
from npucompile.models.batch import Batch
from npucompile.models.family import DraftHead, Intermediates
from npucompile.models.params import Param, Source, initialise

HEAD = "eagle"


def _param(name, *shape):
    return Param(Aval(shape, torch.float32), Source((name,), (shape,)))


def eagle():
    """A family whose draft head reads two hidden states side by side, of the embeddings and after the last layer, the first time in
    a step, and its own state of half that width afterwards. Its layer and its logits are its own.
    """

    def abstract_params(cfg, dtype):
        M, V = cfg.hidden_size, cfg.vocab_size
        layer = hybrid._layer_params(cfg, dtype, "eagle.layer.", hybrid.FULL, joined=False)
        own = {"fuse": _param("eagle.fuse", M, 2 * M), "join": _param("eagle.join", M, 2 * M), "layer": layer}
        own |= {"norm": Param(Aval((M,), dtype), Source(("eagle.norm",), ((M,),)), "zeros"), "head": _param("eagle.head", V, M)}
        return {**hybrid.abstract_params(cfg, dtype), HEAD: own}

    def abstract_state(cfg, limits, dtype):
        return {**hybrid.abstract_state(cfg, limits, dtype), HEAD: attention.state(cfg, limits, dtype)}

    def forward(cfg, params, state, inputs):
        hidden, state, intermediates = hybrid.forward(cfg, params, state, inputs)
        low = sequence_parallel.embed(inputs["tokens"].reshape(-1), params["embed"])
        return hidden, state, Intermediates(torch.cat([low, hidden], -1), intermediates.routers)

    def extend_cache(cfg, params, state, inputs, hidden, *, first):
        own, batch = params[HEAD], Batch.of(inputs, cfg.rotary)
        assert hidden.shape[-1] == (2 if first else 1) * cfg.hidden_size
        hidden = ops.linear(hidden, own["fuse"]) if first else hidden
        stream = ops.linear(torch.cat([sequence_parallel.embed(batch.tokens, params["embed"]), hidden], -1), own["join"])
        stream = sequence_parallel.whole(stream, batch.size * batch.q_len)
        x = ops.rms_norm(stream, own["layer"]["input_norm"], cfg.rms_norm_eps, 1.0)
        pool = attention.write_kv(cfg, own["layer"]["mixer"], state[HEAD], batch, x)
        return {"stream": stream, "normed": x}, {**state, HEAD: pool}

    def draft(cfg, params, state, inputs, rows):
        layer, batch = params[HEAD]["layer"], Batch.of(inputs, cfg.rotary)
        mixed = attention.attend(cfg, layer["mixer"], state[HEAD], batch, rows["normed"])
        x, stream = ops.add_rms_norm(mixed, sequence_parallel.spread(rows["stream"]), layer["post_norm"], cfg.rms_norm_eps, 1.0)
        x, _ = feed_forward.moe(cfg, layer["mlp"], x)
        return ops.add_rms_norm(x, stream, params[HEAD]["norm"], cfg.rms_norm_eps, 1.0)[0]

    def logits(cfg, params, hidden):
        return ops.linear(hidden, params[HEAD]["head"])

    return replace(
        qwen3_5.FAMILY,
        name="eagle",
        model_types=(),
        abstract_params=abstract_params,
        abstract_state=abstract_state,
        forward=forward,
        draft_head=DraftHead(HEAD, extend_cache, draft, logits),
    )


@pytest.fixture(scope="module")
def fake():
    """A random model with a random EAGLE-3 head, its weights, and the model without the head."""
    plain, family = oracle.case("moe"), eagle()
    model = step.Model("fake", family, plain.model.config)
    own = initialise(family.abstract_params(model.config, torch.float32)[HEAD], torch.Generator().manual_seed(2))
    return model, {**plain.weights, HEAD: own}, plain


@pytest.mark.parametrize("drafts", [1, 2, 3])
@torch.no_grad()
def test_a_head_of_other_features_drafts_and_changes_no_output(fake, drafts):
    """Whatever is accepted, its drafts are those of the recursion, from features of the accepted tokens."""
    model, weights, plain = fake
    assert model.has_draft_head
    server = speculators.Server(model, weights, drafts)
    requests = [speculators.Request(plain.prompt(7 + 5 * i, i), i + 1) for i in range(3)]
    truth = [speculators.Request(request.prompt, request.request_slot) for request in requests]
    speculators.Server(plain.model, plain.weights, 0).serve(truth, 40)
    draw, drafted = random.Random(1), [{} for _ in requests]
    outputs = server.prefill(requests, [8, 16])
    while max(len(request.output) for request in requests) < 30:
        for i, request in enumerate(requests):
            drafted[i][request.start - 1] = outputs["drafts"][i].tolist()
            server.plant_drafts(request, truth[i].output, draw.randint(0, drafts))
        outputs = server.decode(requests)
    assert {count for request in requests for count in request.counts} == set(range(1, drafts + 2))
    for request, plain_request, drafts_by_base in zip(requests, truth, drafted, strict=True):
        assert request.output == plain_request.output[: len(request.output)]
        for base in list(drafts_by_base)[::4]:
            assert drafts_by_base[base] == written_out(model, weights, (request.prompt + request.output)[: base + 2], drafts)


def written_out(model, weights, text, drafts):
    """Drafts after a text, from one pass of the head over all of it."""
    cfg, family, head = model.config, model.family, model.family.draft_head
    fresh = unrolled.fresh_step(cfg, 1, len(text) - 1 + drafts)
    pages = torch.arange(1, len(text) + drafts, dtype=torch.int32)[None]
    state = {**fresh.state, HEAD: {name: torch.zeros_like(pool) for name, pool in fresh.state["layers"][-1].items()}}
    ids = torch.tensor([text], dtype=torch.int32)
    inputs = {**fresh.inputs, "page_table": pages, "query_lens": torch.tensor([len(text) - 1], dtype=torch.int32)}
    _, _, intermediates = family.forward(cfg, weights, state, {**inputs, "tokens": ids[:, :-1]})
    inputs["tokens"] = ids[:, 1:]
    rows, state = head.extend_cache(cfg, weights, state, inputs, intermediates.features, first=True)
    hidden = head.draft(cfg, weights, state, inputs, rows)[-1:]
    own_drafts = [int(head.logits(cfg, weights, hidden).argmax())]
    for depth in range(1, drafts):
        one_token = {
            "tokens": torch.tensor([own_drafts[-1:]], dtype=torch.int32),
            "num_computed_tokens": torch.tensor([len(text) - 2 + depth], dtype=torch.int32),
        }
        one_token |= {
            "query_lens": torch.ones(1, dtype=torch.int32),
            "state_slots_out": inputs["state_slots_out"],
            "state_slots_in": inputs["state_slots_in"],
        }
        rows, state = head.extend_cache(cfg, weights, state, {**inputs, **one_token}, hidden, first=False)
        hidden = head.draft(cfg, weights, state, {**inputs, **one_token}, rows)
        own_drafts.append(int(head.logits(cfg, weights, hidden).argmax()))
    return own_drafts


def test_a_model_without_drafts_has_no_parameters_of_the_head(fake):
    model, weights, plain = fake
    assert set(model.params(torch.float32)) == set(plain.weights)
    for drafting in (False, True):
        used = replace(model, drafting=drafting)
        assert (HEAD in used.params(torch.float32)) == drafting
    assert len(tree.flatten(weights)) > len(tree.flatten(plain.weights))
