"""runtime/scheduler/admission.py: a request that can never be served is refused, naming the field."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.graphs.types import Limits
from npucompile.runtime.request import RECEIVE, Request, Sampling
from npucompile.runtime.scheduler.admission import check

LIMITS = Limits(page_size=4, num_pages=17, num_slots=33, max_model_len=32, slots_per_request=4, drafts=3)


def ask(prompt=(1, 2), max_tokens=5, stop=(), **fields):
    return Request("a", tuple(prompt), max_tokens, stop_token_ids=frozenset(stop), **fields)


@pytest.mark.parametrize(
    "request_",
    [
        ask(),
        ask(prompt=[0] * 31, max_tokens=10**9, stop=(0, 12)),
        ask(logprobs=0, speculative_tokens=0),
        ask(logprobs=5, speculative_tokens=3),
    ],
)
def test_what_can_be_served_is(request_):
    check(request_, LIMITS, 13, 5)


@pytest.mark.parametrize(
    "request_, message, param",
    [
        (ask(prompt=()), "prompt has 0 tokens; legal is 1 to 31", "prompt"),
        (ask(prompt=[1] * 32), "prompt has 32 tokens; legal is 1 to 31", "prompt"),
        (ask(prompt=(1, 13)), "prompt has token id 13; legal is an integer from 0 to 12", "prompt"),
        (ask(prompt=(-1,)), "prompt has token id -1", "prompt"),
        (ask(prompt=(True,)), "prompt has token id True", "prompt"),
        (ask(prompt=(1.5,)), "prompt has token id 1.5", "prompt"),
        (ask(max_tokens=-1), "max_tokens is -1; legal is an integer of at least 0", "max_tokens"),
        (ask(max_tokens=2.0), "max_tokens is 2.0", "max_tokens"),
        (ask(stop=(99,)), "stop_token_ids has token id 99; legal is an integer from 0 to 12", "stop_token_ids"),
        (ask(logprobs=6), "logprobs is 6; legal is an integer from 0 to 5, or null", "logprobs"),
        (ask(logprobs=-1), "logprobs is -1", "logprobs"),
        (ask(logprobs=True), "logprobs is True", "logprobs"),
        (ask(speculative_tokens=4), "speculative_tokens is 4; legal is an integer from 0 to 3, or null", "speculative_tokens"),
        (ask(speculative_tokens=1.0), "speculative_tokens is 1.0", "speculative_tokens"),
    ],
)
def test_what_cannot_is_refused(request_, message, param):
    with pytest.raises(RequestError, match=message) as caught:
        check(request_, LIMITS, 13, 5)
    assert caught.value.param == param


def test_prompts_are_scored_with_bitmasks_or_by_score_steps_and_those_of_handovers_by_the_former():
    asked, handed_over = ask(prompt_logprobs=1), ask(prompt_logprobs=1, handover=RECEIVE)
    check(asked, LIMITS, 13, 5, scores=True)
    check(handed_over, LIMITS.with_bitmasks(1, 13), 13, 5)
    for refused, scores in ((asked, False), (handed_over, True)):
        with pytest.raises(RequestError, match="these graphs take none; legal is null, or a build with --structured-outputs"):
            check(refused, LIMITS, 13, 5, scores=scores)


@pytest.mark.parametrize("logprobs", [0, 1])
def test_graphs_without_log_probabilities_refuse_them(logprobs):
    with pytest.raises(RequestError, match=f"logprobs is {logprobs}; these graphs return none, so legal is null") as caught:
        check(ask(logprobs=logprobs), LIMITS, 13, 0)
    assert caught.value.param == "logprobs"


def test_a_prompt_beyond_the_context_has_its_code():
    with pytest.raises(RequestError) as caught:
        check(ask(prompt=[1] * 32), LIMITS, 13, 5)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError) as caught:
        check(ask(prompt=[]), LIMITS, 13, 5)
    assert caught.value.code == "invalid_request_error"


RANKABLE = [
    Sampling(0.0, top_k=500, top_p=0.5),
    Sampling(1.0),
    Sampling(1.0, min_p=0.2),
    Sampling(1.0, top_k=1, top_p=0.9),
    Sampling(1.0, top_k=8, top_p=0.9),
    Sampling(1.0, top_k=13),
    Sampling(1.0, top_k=99),
    Sampling(1.0, top_k=99, top_p=0.9),
    Sampling(1.0, top_p=0.9),
]


@pytest.mark.parametrize("sampling", RANKABLE)
def test_what_needs_no_more_ranks_than_steps_compute_is_served(sampling):
    check(ask(sampling=sampling), LIMITS, 13, 5, 8)


@pytest.mark.parametrize(
    "sampling, message, param",
    [
        (Sampling(1.0, top_k=9), "top_k is 9; these graphs rank the 8 most likely of 13 tokens, so legal is a top_k from 1 to 8", "top_k"),
        (Sampling(1.0, top_k=12, top_p=0.5), "top_k is 12", "top_k"),
    ],
)
def test_what_needs_more_is_refused_only_where_steps_rank_fewer(sampling, message, param):
    check(ask(sampling=sampling), LIMITS, 13, 5)
    with pytest.raises(RequestError, match=message) as caught:
        check(ask(sampling=sampling), LIMITS, 13, 5, 8)
    assert caught.value.param == param
