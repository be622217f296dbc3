"""runtime/bitmasks.py: min_tokens, allowed_token_ids and bad_words restrict output as transformers' processors do, drafts or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.constrained import PROMPTS, Automaton, asking, expected, run, turns
from support.toy_device import Collector

from npucompile.graphs.errors import RequestError
from npucompile.runtime.bitmasks import forbid
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Request, Sampling

V, EVERY = 260, range(260)
LETTERS = tuple(range(ord("a"), ord("z") + 1))


def naive(request: Request, before: Sequence[int]) -> set[int]:
    """What may follow an output, token by token."""
    sampling = request.sampling
    allowed = set(EVERY if sampling.allowed_token_ids is None else sampling.allowed_token_ids)
    ends = {word[-1] for word in sampling.bad_words if (*before, word[-1])[-len(word) :] == word}
    return allowed - ends - (request.stop_token_ids if len(before) < sampling.min_tokens else set())


token = st.integers(0, 5)


@given(
    output=st.lists(token, max_size=6),
    drafts=st.lists(token, max_size=3),
    words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed=st.none() | st.sets(token, min_size=1).map(sorted).map(tuple),
    least=st.integers(0, 8),
    stops=st.frozensets(token, max_size=2),
)
def test_every_position_has_what_the_tokens_before_it_leave(output, drafts, words, allowed, least, stops):
    sampling = Sampling(min_tokens=least, allowed_token_ids=allowed, bad_words=words)
    request = Request("a", (1,), 9, sampling, stop_token_ids=stops)
    bitmask = np.full((4, 9), -1, np.int32)
    forbid(request, output, drafts, len(output), bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, bitorder="little")[:, :V]
    for place in range(len(drafts) + 1):
        before = [*output, *drafts[:place]]
        assert set(np.flatnonzero(bits[place])) == naive(request, before)
    if not request.follows_output(len(output)):
        # Then it may run while tokens are not known: every position has the same.
        assert (bits == bits[0]).all()
    assert request.restricted(len(output)) or bits.all()


@pytest.fixture(scope="module")
def free(executors):
    return [outcome.tokens for outcome in run(executors[1], [asking(prompt) for prompt in PROMPTS])]


def asked(prompt: bytes, tokens: Sequence[int], kind: str) -> tuple[Request, dict]:
    """A request that restricts what its free output would be, and options of transformers for what is not `naive`."""
    ends, words = frozenset([tokens[3]]), ((tokens[0],), tuple(tokens[1:3]), tuple(tokens[4:7]))
    if kind == "min_tokens":
        return asking(prompt, sampling=Sampling(min_tokens=12), stop_token_ids=ends), {"eos_token_id": sorted(ends), "min_new_tokens": 12}
    if kind == "allowed":
        return asking(prompt, sampling=Sampling(allowed_token_ids=LETTERS)), {}
    if kind == "bad words":
        return asking(prompt, sampling=Sampling(bad_words=words)), {}
    # What the grammar allows, with words that its output alone would have.
    followed = Automaton(lambda output: turns(output))
    return asking(prompt, followed, sampling=Sampling(bad_words=tuple((token,) for token in (*b"aeiou05", tokens[0])))), {}


@pytest.mark.parametrize("kind", ["min_tokens", "allowed", "bad words", "grammar"])
def test_output_is_that_of_transformers_beside_free_requests(executors, theirs, free, kind):
    """More restricted requests than a step has bitmasks, with drafts and without."""

    def legal(request: Request, output: Sequence[int]) -> list[int]:
        # The end of the sequence is left to transformers' own processor.
        left = naive(replace(request, stop_token_ids=frozenset()), output)
        return sorted(left & set(turns(output)) if request.constraint else left)

    cases = [asked(prompt, tokens, kind) for prompt, tokens in zip(PROMPTS, free, strict=True)]
    want = []
    for prompt, (request, options) in zip(PROMPTS, cases, strict=True):
        tokens = expected(theirs, prompt, partial(legal, request), **options)
        (stop,) = request.stop_token_ids
        want.append(tokens[: tokens.index(stop)] if stop in tokens else tokens)
    assert sum(tokens != alone[: len(tokens)] for tokens, alone in zip(want, free, strict=True)) >= 4
    for executor in (*executors[:2], tiny.Launching(executors[0])):
        others = [asking(prompt, name=f"free {i}") for i, prompt in enumerate(PROMPTS)]
        requests = [request for pair in zip([request for request, _ in cases], others, strict=True) for request in pair]
        outcomes = run(executor, requests)
        assert [outcome.tokens for outcome in outcomes[::2]] == want
        assert [outcome.tokens for outcome in outcomes[1::2]] == free


@pytest.mark.parametrize(
    ("sampling", "ahead"),
    [
        (Sampling(allowed_token_ids=LETTERS), True),
        (Sampling(bad_words=((1,),)), True),
        (Sampling(bad_words=((1, 2),)), False),
        (Sampling(min_tokens=16), False),
        (Sampling(min_tokens=8), True),
    ],
)
def test_only_what_depends_on_the_output_waits_for_it(executors, sampling, ahead):
    """Steps are launched while one is in flight, from the token on at which a minimum is reached, and the tokens are the same."""
    request = asking(PROMPTS[0], sampling=sampling)
    (alone,) = run(executors[0], [request])
    with tiny.Launching(executors[0]) as executor:
        (outcome,) = run(executor, [request])
    assert outcome.tokens == alone.tokens
    # Both the prefill and the first step may be in flight.
    assert (executor.most_in_flight > 1) == ahead


@pytest.mark.parametrize("sampling", [Sampling(min_tokens=9), Sampling(allowed_token_ids=(97,)), Sampling(bad_words=((tiny.EOS,),))])
def test_a_form_that_is_complete_ends_whatever_else_is_asked(executors, sampling):
    form = Automaton(lambda output: [tiny.EOS] if len(output) > 3 else [97])
    for executor in executors[:2]:
        (outcome,) = run(executor, [asking(PROMPTS[0], form, sampling=sampling)])
        assert (outcome.tokens, outcome.end.reason) == ([97] * 4, "stop")


def test_a_form_without_a_common_token_is_a_dead_end_that_names_both(executors):
    form = Automaton(lambda output: [98] if len(output) > 3 else [97])
    (outcome,) = run(executors[0], [asking(PROMPTS[0], form, sampling=Sampling(allowed_token_ids=(97,)))])
    assert (outcome.tokens, outcome.end.reason, outcome.end.code) == ([97] * 4, "error", "constraint_dead_end")
    assert "under its constraint: allowed_token_ids forbid every token that it allows" in outcome.end.message


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        ({"min_tokens": 3}, "min_tokens", "--structured-outputs"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids", "--structured-outputs"),
        ({"bad_words": ((1,),)}, "bad_words", "--structured-outputs"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens is 16"),
        ({"allowed_token_ids": (V,)}, "allowed_token_ids", "0 to 259"),
        ({"bad_words": ((1, V),)}, "bad_words", "0 to 259"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(executors, sampling, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        Engine(executors[2]).submit(asking(PROMPTS[0], sampling=Sampling(**sampling)), Collector())
    assert caught.value.param == param
