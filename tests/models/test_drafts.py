"""models/drafts.py: drafts and draft cache of every step are those of one pass over the whole text."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from support import oracle, speculators, unrolled

from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.types import Bucket
from npucompile.models import hybrid
from npucompile.models.presets import BUNDLED
from npucompile.models.step import program

MODELS = ["dense", "moe"]
TOLERANCE = 1e-5


def recursion(model, weights, text, bases, depth):
    """Drafts [R, depth] after tokens base + 1 of a text, by the recursion that trains draft heads."""
    out = unrolled.unroll(model.config, weights, torch.tensor([text]), torch.tensor([bases]), own_tokens=True, depth=depth)
    logits = [out.first[0, bases], *(deeper[0] for deeper in out.deeper)]
    return torch.stack([of_depth.argmax(-1) for of_depth in logits], 1)


def cache(model, weights, text):
    """Keys and values of the draft head after one pass over a text: position p from hidden state p and token p + 1."""
    ids = torch.tensor([text], dtype=torch.int32)
    step = unrolled.fresh_step(model.config, 1, len(text) - 1)
    hidden, state, _ = hybrid.forward(model.config, weights, step.state, {**step.inputs, "tokens": ids[:, :-1]})
    _, state = hybrid.extend_draft_cache(model.config, weights, state, {**step.inputs, "tokens": ids[:, 1:]}, hidden, first=True)
    return {f"mtp.{name}": pool[1:, 0] for name, pool in state["mtp"].items()}


def expect_cache(server, course, request):
    """The pages of a request hold the draft head's keys and values of all its tokens in the caches."""
    expected, memory = cache(course.model, course.weights, request.prompt + request.output), server.memory(request)
    for name, rows in expected.items():
        assert len(memory[name]) == request.start
        torch.testing.assert_close(memory[name], rows[: request.start], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_drafts_and_cache_are_those_of_the_whole_text(name, drafts):
    """In three rows at every step, whatever was accepted before; request slots hold the same drafts."""
    model = oracle.drafting(name)
    server = speculators.Server(model.model, model.weights, drafts)
    requests = [speculators.Request(model.prompt(6 + 4 * i, i), i + 1) for i in range(3)]
    plain = [speculators.Request(request.prompt, request.request_slot) for request in requests]
    speculators.Server(model.model, model.weights, 0).serve(plain, 16 + 8 * drafts)
    drafted, draw = [{} for _ in requests], random.Random(drafts)
    outputs = server.prefill(requests)
    for step in range(9):
        for i, (request, row) in enumerate(zip(requests, outputs["drafts"].tolist(), strict=True)):
            drafted[i][request.start - 1] = row
            accepted = request.counts[-1] - 1 if step else 0
            assert server.request_slots[request.request_slot].tolist() == [request.start, accepted, request.output[-1], *row]
            server.plant_drafts(request, plain[i].output, draw.randint(0, drafts))
        outputs = server.decode(requests)
    for request, rows in zip(requests, drafted, strict=True):
        wanted = recursion(model.model, model.weights, request.prompt + request.output, list(rows), drafts)
        assert list(rows.values()) == wanted.tolist()
        expect_cache(server, model, request)


@pytest.mark.parametrize("bucket", [Bucket("decode", 3, 4), Bucket("prefill", 2, 16)], ids=lambda bucket: bucket.name)
@pytest.mark.parametrize("name", MODELS)
def test_one_token_of_each_row_goes_through_the_whole_head(name, bucket):
    """The other tokens only write keys and values, however many are drafted."""
    graph, rows = trace(program(oracle.drafting(name).model, bucket, speculators.limits(3), torch.float32)).graph, bucket.batch
    calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_module" and "draft" in node.target)
    assert calls == {"extend_draft_cache": 1, "draft": 3, "extend_draft_cache_own": 2}
    counts = {part: tokens(bodies(graph)[part]) for part in calls}
    fed = {"moe_experts": [rows], "moe_route": [rows]} if name == "moe" else {}
    assert counts["draft"] == {"rope": [rows], "paged_attention": [rows], "add_rms_norm": [rows] * 2, "swiglu_linear": [rows], **fed}
    assert counts["extend_draft_cache"] == {"cache_write": [bucket.tokens], "rope": [bucket.tokens]}
    assert counts["extend_draft_cache_own"] == {"cache_write": [rows], "rope": [rows]}


def tokens(part):
    """Numbers of tokens in each call of a primitive in a body, by primitive."""
    counts = {}
    for node in part.graph.nodes:
        kind = getattr(node.target, "_opname", "")
        if kind in ("rope", "cache_write", "paged_attention", "add_rms_norm", "swiglu_linear", "moe_route", "moe_experts"):
            operand = node.args[2 if kind == "cache_write" else 0].meta["val"]
            counts.setdefault(kind, []).append(operand.shape[0] * (operand.shape[1] if kind == "paged_attention" else 1))
    return counts


@pytest.mark.parametrize("name", BUNDLED)
@torch.no_grad()
def test_drafts_of_a_trained_head_are_those_of_the_whole_text(name):
    """No drafts are planted: drafts follow accepted drafts."""
    model = oracle.drafting(name)
    server, request = speculators.Server(model.model, model.weights, 3), speculators.Request(model.prompt(11), 2)
    drafted = {}
    outputs = server.prefill([request])
    while len(request.output) < 40:
        drafted[request.start - 1] = outputs["drafts"][0].tolist()
        outputs = server.decode([request])
    assert max(request.counts) > 1
    assert list(drafted.values()) == recursion(model.model, model.weights, request.prompt + request.output, list(drafted), 3).tolist()


@pytest.mark.parametrize("chunks", [[33], [40], [5, 28], [32, 32], [1, 1, 31], [8, 8, 8, 8, 8]], ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_cut_of_a_prompt_changes_no_draft(name, chunks):
    """The token after a chunk is known from the prompt, so the draft cache has no hole at a cut."""
    model = oracle.drafting(name)
    server, request = speculators.Server(model.model, model.weights, 3), speculators.Request(model.prompt(33), 3)
    outputs = server.prefill([request], chunks)
    text = request.prompt + request.output
    assert outputs["drafts"].tolist() == recursion(model.model, model.weights, text, [32], 3).tolist()
    assert server.request_slots[3].tolist() == [33, 0, request.output[0], *outputs["drafts"][0].tolist()]
    expect_cache(server, model, request)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_preempted_request_drafts_the_same_after_its_second_prefill(name):
    """Prompt and output are prefilled in another request slot."""
    model = oracle.drafting(name)
    server, request = speculators.Server(model.model, model.weights, 3), speculators.Request(model.prompt(9), 1)
    outputs = [server.prefill([request])]
    while len(request.output) < 20:
        outputs.append(server.decode([request]))
    resumed = speculators.Request(request.prompt, 4, output=request.output[:-1])
    drafted = server.prefill([resumed], [8, 8, 16])["drafts"]
    assert resumed.output == request.output
    assert drafted.tolist() == outputs[-1]["drafts"].tolist()
    expect_cache(server, model, resumed)


@pytest.mark.parametrize("drafts", [1, 3, 7])
@torch.no_grad()
def test_no_draft_is_made_beyond_the_longest_context(drafts):
    """Drafts up to the last position are those of the whole text; later ones, and a step after the end, write nothing."""
    model, context = oracle.drafting("dense"), 24
    sizes = speculators.limits(drafts, context, 3)
    server, request = speculators.Server(model.model, model.weights, drafts, sizes=sizes), speculators.Request(model.prompt(15), 2)
    outputs = server.prefill([request])
    while request.start < context:
        places = context - request.start
        drafted = outputs["drafts"][0].tolist()
        assert all(0 <= token < 97 for token in drafted)
        text = request.prompt + request.output
        expected = recursion(model.model, model.weights, text, [request.start - 1], drafts)[0].tolist()
        # Draft j is read at position start + 1 + j; the pass that makes it reads position start + j.
        assert drafted[: places + 1] == expected[: places + 1]
        outputs = server.decode([request])
    server.decode([request])
    expect_cache(server, model, request)
    server.expect_untouched([2])
