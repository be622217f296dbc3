"""A greedy request says the same with drafts as without them, whatever was drafted and however much of it is kept.

The truth is what the programs without drafts say, which transformers confirms. Drafts are substituted on the device: so many right
ones, then a wrong one, then right ones again, which must not count.
"""

from __future__ import annotations

import itertools
import random

import pytest
from support import oracle, speculators
from tokenizers import Tokenizer

from npucompile.models import registry

MODELS = ["dense", "moe"]


def together(*rights):
    """Steps of rows 0, 1, ... that fill their bucket."""
    return [(None, dict(enumerate(right))) for right in rights]


@pytest.mark.parametrize("name", MODELS)
def test_the_truth_is_that_of_transformers(courses, name):
    course = courses(name)
    for prompt, said in zip(course.prompts, course.truth, strict=True):
        theirs = course.random.logits([*prompt, *said[:-1]])[len(prompt) - 1 :]
        assert said == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_of_kept_drafts_in_three_rows(courses, name, drafts):
    """8, 27 and 64 steps, in random order."""
    course, rights = courses(name), list(itertools.product(range(drafts + 1), repeat=3))
    random.Random(drafts).shuffle(rights)
    course.walk(course.server(drafts), together(*rights))


@pytest.mark.parametrize("drafts", [4, 5, 6, 7])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_of_kept_drafts_in_two_rows_of_six(courses, name, drafts):
    """A Latin square: each two neighbours keep every number beside every other one, and all rows keep the same."""
    course, Q = courses(name), drafts + 1
    rights = [tuple((i + b * j) % Q for b in range(6)) for i in range(Q) for j in range(Q)]
    assert all(len({right[b : b + 2] for right in rights}) == Q**2 for b in range(5))
    random.Random(drafts).shuffle(rights)
    course.walk(course.server(drafts), together(*rights))


@pytest.mark.parametrize("name", MODELS)
def test_buckets_padding_and_rows_that_verify_fewer_drafts(courses, name):
    """Each step takes other rows, in any order, in a bucket of 1, 2, 4 or 8; no, one, two or three of a row's drafts are verified."""
    course, draw = courses(name), random.Random(1)
    steps = []
    for size in [1, 2, 4, 8] * 8:
        rows = draw.sample(range(6), draw.randint(max(1, size // 2), min(size, 6)))
        steps.append((size, {i: draw.randint(0, 3) for i in rows}))
    course.walk(course.server(3), steps, drafts=(0, None, 1, 3, 0, 2))


@pytest.mark.parametrize("name", MODELS)
def test_what_no_row_looks_at_may_hold_anything(courses, name):
    """The embedding of a token that nobody says is NaN: it is the token of all padding, and of drafts that are not verified."""
    course, rows, until = courses(name), (5, 3, 1), 20
    said = {token for i in rows for token in course.prompts[i] + course.truth[i][: until + 8]}
    wrong = {token + 1 for i in rows for token in course.truth[i][: until + 8]}
    padding = next(token for token in range(1, 97) if token not in said | wrong)
    weights = {**course.random.weights, "embed": course.random.weights["embed"].clone()}
    weights["embed"][padding] = float("nan")
    server, draw = speculators.Server(course.random.model, weights, 3, padding=padding), random.Random(2)
    steps = [(4, {i: draw.randint(0, 3) for i in rows}) for _ in range(30)]
    course.walk(server, steps, (None, 0, None, 1, None, 3), until, chunks=(3, 8))
    server.untouched([i + 1 for i in rows])


TOLD = 60
TEXTS = (
    "In the beginning God created the heaven and the",
    "And the angel of the LORD said unto her, Behold, thou",
    "Blessed is the man that walketh not in the counsel of",
    "Now these are the names of the sons of Israel, which",
)


@pytest.fixture(scope="module")
def texts():
    """Prompts, and what the bundled model says to them by programs without drafts."""
    random = oracle.drafting("qwen3.5-tiny")
    tokenizer = Tokenizer.from_file(str(registry.find("qwen3.5-tiny").tokenizer))
    requests = [speculators.Request(tokenizer.encode(text).ids, i + 1) for i, text in enumerate(TEXTS)]
    speculators.Server(random.model, random.weights, 0).serve(requests, TOLD)
    for request in requests:
        theirs = random.logits([*request.prompt, *request.said[:-1]])[len(request.prompt) - 1 :]
        assert request.said == theirs.argmax(-1).tolist()
    return [request.prompt for request in requests], [request.said for request in requests]


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_the_bundled_model_says_the_same_with_its_own_drafts(texts, drafts):
    """Nothing is substituted; some steps keep all drafts and some none."""
    prompts, truth = texts
    random = oracle.drafting("qwen3.5-tiny")
    server = speculators.Server(random.model, random.weights, drafts)
    requests = [speculators.Request(prompt, i + 1) for i, prompt in enumerate(prompts)]
    server.serve(requests, TOLD)
    assert [request.said[:TOLD] for request in requests] == truth
    counts = [count for request in requests for count in request.counts]
    assert {1, drafts + 1} <= set(counts)
    assert sum(counts) / len(counts) > 1.5
