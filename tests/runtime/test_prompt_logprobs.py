"""Log probabilities of prompts are those of transformers, and what is generated behind them is what it is without them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.constrained import Automaton, asking, run, turns
from support.toy_device import Collector, finished

from npucompile.graphs.errors import RequestError
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.steps.score import SCORE
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.journal import Journal
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Event, Logprobs, Request, Sampling, TokenEvent
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

TEXT = b"In the beginning God created the heaven and the earth. And the earth was without form, and void."
MOST, TOKENS = 3, 12


class Scored(Collector):
    """Sink of a request that wants log probabilities of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_logprobs: list[Logprobs] = []

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, TokenEvent):
            # What is told of the prompt is told before anything else.
            assert not event.prompt_logprobs or len(self.tokens) == len(event.token_ids)
            self.prompt_logprobs += event.prompt_logprobs


def finish(engine: Engine, requests: Sequence[Request]) -> list[Scored]:
    return finished(engine, requests, Scored)


@torch.no_grad()
def logprobs_of(theirs: Any, tokens: Sequence[int]) -> torch.Tensor:
    """What transformers gives each token at each position but the first: [len - 1, V]."""
    return torch.log_softmax(theirs(torch.tensor([list(tokens)])).logits[0, :-1], -1)


def check(theirs: Any, tokens: Sequence[int], found: Sequence[Logprobs], first: int, most: int) -> None:
    expected = logprobs_of(theirs, tokens)[first - 1 :]
    assert len(found) == len(expected)
    for entry, row, token in zip(found, expected, tokens[first:], strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(most).values.tolist(), abs=1e-4)
        assert [row[likely].item() for likely, _ in entry.top] == pytest.approx([value for _, value in entry.top], abs=1e-4)


def rules(kind: str, ends: int) -> dict[str, Any]:
    """Options of a request; they concern what comes behind the prompt."""
    return {
        "greedy": {},
        "seeded": {"sampling": Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5)},
        "penalties": {"sampling": Sampling(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)},
        "minimum": {"sampling": Sampling(min_tokens=5), "stop_token_ids": frozenset([*TEXT, ends])},
        "bad words": {"sampling": Sampling(bad_words=((ends,), (TEXT[59], ord("t"))))},
        "grammar": {"constraint": Automaton(turns)},
    }[kind]


# Shorter than a prefill chunk, longer, and scored from behind one.
PARTS = [(1, 1), (2, 1), (9, 1), (60, 45), (60, 60), (33, 32)]


KINDS = ["greedy", "seeded", "penalties", "minimum", "bad words", "grammar"]


# By decode steps, and by score steps.
DRAFTS, PLAIN, FREE, DRAFTS_SCORED, PLAIN_SCORED = range(5)
WAYS = [
    *((which, kind, False) for which in (DRAFTS, DRAFTS_SCORED) for kind in KINDS),
    *((which, "seeded", ahead) for which, ahead in ((PLAIN, False), (DRAFTS, True), (PLAIN_SCORED, False), (DRAFTS_SCORED, True))),
    (PLAIN_SCORED, "grammar", True),
]


@pytest.mark.parametrize(("which", "kind", "ahead"), WAYS)
def test_prompts_are_scored_as_by_transformers_and_the_output_is_the_same(executors, theirs, which, kind, ahead):
    ends = run(executors[1], [asking(TEXT[:20])])[0].tokens[1]
    plain, scored = [], []
    for number, (length, first) in enumerate(PARTS):
        one = asking(TEXT[:length], name=f"plain {number}", max_tokens=TOKENS, **rules(kind, ends))
        plain.append(one)
        own = {"constraint": Automaton(turns)} if one.constraint else {}
        scored.append(replace(one, id=f"scored {number}", prompt_logprobs=MOST, prompt_logprobs_from=first, logprobs=1, **own))
    executor = executors[which]
    with tiny.Launching(executor) if ahead else nullcontext(executor) as device:
        outcomes = finish(Engine(device), [*plain, *scored])
    for one, other, request, (length, first) in zip(outcomes, outcomes[len(plain) :], scored, PARTS, strict=False):
        assert other.tokens == one.tokens
        assert (other.end.reason, other.end.prompt_tokens, other.end.completion_tokens) == (
            one.end.reason, length, one.end.completion_tokens,
        )  # fmt: skip
        assert not one.prompt_logprobs
        check(theirs, request.prompt, other.prompt_logprobs, first, MOST)
        end = other.end.ended_by
        assert (end is None) == (other.end.reason == "length")
        output = [*other.tokens, *([end[0]] if end else [])]
        found = [*other.logprobs, *([end[1]] if end else [])]
        check(theirs, (*request.prompt, *output), found, length, 1)


@pytest.mark.parametrize("which", [DRAFTS, PLAIN, DRAFTS_SCORED, PLAIN_SCORED])
def test_nothing_is_generated_behind_a_prompt_if_nothing_is_wanted(executors, theirs, which):
    options = {"max_tokens": 0, "prompt_logprobs": 0}
    requests = [asking(TEXT[:n], name=f"{n} {first}", prompt_logprobs_from=first, **options) for n, first in PARTS]
    for request, outcome, (length, first) in zip(requests, finish(Engine(executors[which]), requests), PARTS, strict=False):
        assert (outcome.tokens, outcome.end.reason, outcome.end.completion_tokens, outcome.end.prompt_tokens) == ([], "length", 0, length)
        check(theirs, request.prompt, outcome.prompt_logprobs, first, 0)


@pytest.mark.parametrize(("which", "most", "shorter"), [(DRAFTS, 4, 0), (DRAFTS_SCORED, 50, 30)])
def test_scores_survive_preemption(executors, theirs, which, most, shorter):
    """Pages for less than two of them: each is prefilled again with what had been scored."""
    executor = executors[which]
    executor = tiny.Narrowed(executor, executor.buckets, num_pages=executor.limits.pages_per_request + 2)
    parts = [(0, 60, 45), (3, 60 - shorter, 45 - shorter)]
    requests = [
        asking(TEXT[n : n + length], max_tokens=most, name=f"{n}", prompt_logprobs=1, prompt_logprobs_from=first)
        for n, length, first in parts
    ]
    outcomes = finish(Engine(executor), requests)
    assert sum(outcome.end.record.preemptions for outcome in outcomes)
    for request, outcome in zip(requests, outcomes, strict=True):
        check(theirs, request.prompt, outcome.prompt_logprobs, request.prompt_logprobs_from, 1)
        assert outcome.end.record.first_token_ms > 0


@pytest.mark.parametrize("which", [DRAFTS, DRAFTS_SCORED])
def test_a_run_with_scores_can_be_repeated(executors, which):
    entries: list[list[Any]] = []
    engine = Engine(executors[which])
    engine.stepper.journal = Journal(lambda entry: entries.append(msgpack.unpackb(msgpack.packb(entry))))
    requests = [replace(asking(TEXT[:n], Automaton(turns), name=f"{n}"), prompt_logprobs=1) for n in (5, 9)]
    outcomes = finish(engine, requests)
    repeated = replay(Engine(executors[which]), entries)
    assert repeated.divergence is None
    assert repeated.tokens == sum(len(request.prompt) - 1 + len(one.tokens) for request, one in zip(requests, outcomes, strict=True))


def test_graphs_without_bitmasks_score_nothing(executors):
    def refused(executor: Executor, **options: Any) -> RequestError:
        with pytest.raises(RequestError) as caught:
            Engine(executor).submit(replace(asking(TEXT[:5]), **options), Collector())
        assert caught.value.param == "prompt_logprobs"
        return caught.value

    assert "--structured-outputs" in str(refused(executors[2], prompt_logprobs=1))
    assert "from 1 to 5, the length of the prompt" in str(refused(executors[0], prompt_logprobs=1, prompt_logprobs_from=6))
    assert "0 to" in str(refused(executors[0], prompt_logprobs=21))


@pytest.mark.parametrize("which", [DRAFTS, DRAFTS_SCORED, PLAIN_SCORED])
def test_what_is_kept_of_prefixes_is_what_was_scored(executors, theirs, which):
    """A prompt is read from the cache as far as nobody asks for its scores; what a scored one leaves there is what any would."""
    alone = run(executors[which], [asking(TEXT[:70], name="alone")])[0].tokens
    engine = Engine(executors[which], prefix_cache=PrefixCacheSettings())
    for first in (1, 45):
        (outcome,) = finish(engine, [asking(TEXT[:70], name="scored", prompt_logprobs=MOST, prompt_logprobs_from=first)])
        check(theirs, TEXT[:70], outcome.prompt_logprobs, first, MOST)
        assert outcome.tokens == alone
    cached = []
    for name in ("first", "second"):
        (outcome,) = finish(engine, [asking(TEXT[:70], name=name)])
        assert outcome.tokens == alone
        cached.append(outcome.end.record.cached_tokens)
    (outcome,) = finish(engine, [asking(TEXT[:70], name="scored", prompt_logprobs=MOST, prompt_logprobs_from=60)])
    check(theirs, TEXT[:70], outcome.prompt_logprobs, 60, MOST)
    assert (outcome.tokens, 0 < outcome.end.record.cached_tokens < 60 <= cached[1]) == (alone, True)


def steps_of(outcome: Scored) -> set[str]:
    return set(outcome.end.record.prefill_chunks)


@pytest.mark.parametrize("which", [DRAFTS_SCORED, PLAIN_SCORED])
def test_score_steps_score_what_is_asked_for_and_others_share_them_that_come_behind(executors, which):
    executor = executors[which]
    asked = [asking(TEXT[:40], name="scored", prompt_logprobs=0, max_tokens=2), asking(TEXT[:5], name="behind", max_tokens=2)]
    scored, behind = finish(Engine(executor), asked)
    assert steps_of(scored) | steps_of(behind) <= {bucket.name for bucket in SCORE.among(executor.buckets)}
    before, scored = finish(Engine(executor), asked[::-1])
    assert steps_of(before) <= {bucket.name for bucket in PREFILL.among(executor.buckets)}
    assert steps_of(scored) <= {bucket.name for bucket in SCORE.among(executor.buckets)}
    (late,) = finish(Engine(executor), [replace(asked[0], prompt_logprobs_from=38)])
    assert [name.split("-")[0] for name in late.end.record.prefill_chunks] == ["prefill", "prefill", "score"]
    # Nothing of a prompt is left to decode steps.
    assert sum(count for _, count in late.end.record.decode_steps) == 1


@pytest.fixture(scope="module")
def more_executors(executors):
    return [CpuExecutor(executor.artifact) for executor in executors]


REQUESTS = st.tuples(
    st.integers(0, 9), st.integers(1, 70), st.one_of(st.none(), st.integers(1, 70)), st.integers(0, 5), st.sampled_from([None, 0, 2])
)


@settings(max_examples=25, deadline=None)
@given(
    drafts=st.booleans(),
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    prefixes=st.booleans(),
    ahead=st.booleans(),
    few_pages=st.booleans(),
    groups=st.integers(1, 2),
)
def test_score_steps_give_what_decode_steps_give(executors, more_executors, drafts, requests, prefixes, ahead, few_pages, groups):
    """Of any prompts together, of one dp group or two, from any positions on, in chunks, of prefixes that are cached, and of those that are
    preempted."""

    def outcomes(which: int) -> list[Scored]:
        executor = tiny.Groups(*(of[which] for of in (executors, more_executors)[:groups]))
        if few_pages:
            executor.limits = replace(executor.limits, num_pages=executor.limits.pages_per_request + 2)
        asked = [
            asking(
                TEXT[place : place + length],
                name=f"{number}",
                max_tokens=tokens,
                prompt_logprobs=None if first is None else 2,
                prompt_logprobs_from=min(first or 1, length),
                logprobs=logprobs,
            )
            for number, (place, length, first, tokens, logprobs) in enumerate(requests)
            if tokens or first
        ]
        with tiny.Launching(executor) if ahead else nullcontext(executor) as device:
            return finish(Engine(device, prefix_cache=PrefixCacheSettings() if prefixes else None), asked)

    pairs = (DRAFTS, DRAFTS_SCORED) if drafts else (PLAIN, PLAIN_SCORED)
    for right, found in zip(*map(outcomes, pairs), strict=True):
        assert (found.tokens, found.end.reason) == (right.tokens, right.end.reason)
        for ours, theirs in ((found.prompt_logprobs, right.prompt_logprobs), (found.logprobs, right.logprobs)):
            assert [len(entry.top) for entry in ours] == [len(entry.top) for entry in theirs]
            assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
            tops, right_tops = ([value for entry in each for _, value in entry.top] for each in (ours, theirs))
            assert tops == pytest.approx(right_tops, abs=1e-4)
