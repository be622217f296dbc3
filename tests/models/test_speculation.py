"""models/: the output of a greedy request is the same with drafts as without them, whatever is drafted and accepted.

The truth is the output of programs without drafts, checked against transformers. Drafts are planted on the device: some right ones, a
wrong one, and right ones after it, which must not count.
"""

from __future__ import annotations

import itertools
import random

import pytest
from support import oracle, speculators
from tokenizers import Tokenizer

from npucompile.models import registry

MODELS = ["dense", "moe", "latent"]


def together(*rights):
    """Steps whose rows 0, 1, ... fill their bucket, with so many right drafts in each row."""
    return [(None, dict(enumerate(right))) for right in rights]


@pytest.mark.parametrize("name", MODELS)
def test_the_truth_is_that_of_transformers(courses, name):
    course = courses(name)
    for prompt, output in zip(course.prompts, course.truth, strict=True):
        theirs = course.random.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        assert output == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_of_accepted_drafts_in_three_rows(courses, name, drafts):
    """8, 27 and 64 steps, in random order."""
    course, rights = courses(name), list(itertools.product(range(drafts + 1), repeat=3))
    random.Random(drafts).shuffle(rights)
    course.walk(course.server(drafts), together(*rights))


@pytest.mark.parametrize("drafts", [*(pytest.param(drafts, marks=pytest.mark.long) for drafts in (4, 5, 6)), 7])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_of_accepted_drafts_in_two_rows_of_six(courses, name, drafts):
    """A Latin square: over all steps every two neighbouring rows accept every pair of counts."""
    course, Q = courses(name), drafts + 1
    rights = [tuple((i + b * j) % Q for b in range(6)) for i in range(Q) for j in range(Q)]
    assert all(len({right[b : b + 2] for right in rights}) == Q**2 for b in range(5))
    random.Random(drafts).shuffle(rights)
    course.walk(course.server(drafts), together(*rights))


@pytest.mark.parametrize("name", MODELS)
def test_buckets_padding_and_rows_that_verify_fewer_drafts(courses, name):
    """Each step has other rows, in any order, in a bucket of 1, 2, 4 or 8, and rows verify zero to three drafts."""
    course, draw = courses(name), random.Random(1)
    steps = []
    for size in [1, 2, 4, 8] * 8:
        rows = draw.sample(range(6), draw.randint(max(1, size // 2), min(size, 6)))
        steps.append((size, {i: draw.randint(0, 3) for i in rows}))
    course.walk(course.server(3), steps, drafts=(0, None, 1, 3, 0, 2))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_no_row_reads_may_be_anything(courses, name):
    """Padding and unverified drafts hold a token whose embedding is NaN and which no output contains."""
    course, rows, until = courses(name), (5, 3, 1), 20
    used = {token for i in rows for token in course.prompts[i] + course.truth[i][: until + 8]}
    wrong = {token + 1 for i in rows for token in course.truth[i][: until + 8]}
    padding = next(token for token in range(1, 97) if token not in used | wrong)
    weights = {**course.random.weights, "embed": course.random.weights["embed"].clone()}
    weights["embed"][padding] = float("nan")
    server, draw = speculators.Server(course.random.model, weights, 3, padding=padding), random.Random(2)
    steps = [(4, {i: draw.randint(0, 3) for i in rows}) for _ in range(30)]
    course.walk(server, steps, (None, 0, None, 1, None, 3), until, chunks=(3, 8))
    server.expect_untouched([i + 1 for i in rows])


TOKENS = 60
TEXTS = (
    "In the beginning God created the heaven and the",
    "And the angel of the LORD said unto her, Behold, thou",
    "Blessed is the man that walketh not in the counsel of",
    "Now these are the names of the sons of Israel, which",
)


@pytest.fixture(scope="module")
def texts():
    """Prompts, and the outputs of the bundled model by programs without drafts."""
    random = oracle.drafting("qwen3.5-tiny")
    tokenizer = Tokenizer.from_file(str(registry.find("qwen3.5-tiny").tokenizer))
    requests = [speculators.Request(tokenizer.encode(text).ids, i + 1) for i, text in enumerate(TEXTS)]
    speculators.Server(random.model, random.weights, 0).serve(requests, TOKENS)
    for request in requests:
        theirs = random.logits([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        assert request.output == theirs.argmax(-1).tolist()
    return [request.prompt for request in requests], [request.output for request in requests]


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_the_bundled_model_has_the_same_output_with_its_own_drafts(texts, drafts):
    """No drafts are planted; some steps accept all drafts and some none."""
    prompts, truth = texts
    random = oracle.drafting("qwen3.5-tiny")
    server = speculators.Server(random.model, random.weights, drafts)
    requests = [speculators.Request(prompt, i + 1) for i, prompt in enumerate(prompts)]
    server.serve(requests, TOKENS)
    assert [request.output[:TOKENS] for request in requests] == truth
    counts = [count for request in requests for count in request.counts]
    assert {1, drafts + 1} <= set(counts)
    assert sum(counts) / len(counts) > 1.5


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_any_width_give_the_tokens_of_steps_of_one(courses, name):
    """A step verifies what the one before it drafted, as far as both are wide enough; a narrow one starts from any of the state slots that
    a wide one wrote, and leaves drafts and numbers behind that a wide one goes on from. Greedy and sampled."""
    course, draw = courses(name), random.Random(5)
    knobs = ({}, {"temperature": 0.9, "top_k": 7, "seed": 3}, {"temperature": 1.1, "seed": 8})
    plain, own, planted = ([course.request(i, **knobs[i]) for i in range(3)] for _ in range(3))
    course.server(0).serve(plain, 100)
    server = course.server(3)
    server.serve(own, 1)
    server.decode_until(own, 60, [draw.choice((1, 2, 4)) for _ in range(200)])
    server = course.server(3)
    server.serve(planted, 1)
    while min(len(request.output) for request in planted) < 60:
        for request, truth in zip(planted, plain, strict=True):
            server.plant_drafts(request, truth.output, draw.randint(0, 3))
        server.decode(planted, 4, draw.choice((1, 2, 4)))
    for requests in (own, planted):
        assert [request.output[:60] for request in requests] == [request.output[:60] for request in plain]
    assert {1, 2, 3, 4} <= {count for request in planted for count in request.counts}


def test_a_wide_step_after_narrow_ones_drafts_as_if_there_had_been_none(texts):
    """The draft head's cache has the tokens of steps that draft nothing."""
    prompts, truth = texts
    model = oracle.drafting("qwen3.5-tiny")
    server = speculators.Server(model.model, model.weights, 3)
    narrow = speculators.Request(prompts[0], 2)
    server.serve([narrow], 1)
    server.decode_until([narrow], 30, [1] * 29)
    drafts = server.decode([narrow])["drafts"][0].tolist()
    fresh = speculators.Request(prompts[0], 3, output=list(narrow.output[:-1]))
    assert server.prefill([fresh])["drafts"][0].tolist() == drafts
    assert narrow.output == fresh.output == truth[0][: len(fresh.output)]
