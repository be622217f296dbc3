"""Log probabilities of prompts are those of transformers, and what is generated behind them is what it is without them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from support import tiny
from support.constrained import Automaton, Outcome, asking, run, turns

from npucompile.graphs.errors import RequestError
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.journal import Journal
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Event, Logprobs, Request, Sampling, TokenEvent
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

TEXT = b"In the beginning God created the heaven and the earth. And the earth was without form, and void."
MOST, TOKENS = 3, 12


class Scored(Outcome):
    """Sink of a request that wants log probabilities of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_logprobs: list[Logprobs] = []
        self.logprobs: list[Logprobs] = []

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, TokenEvent):
            # What is told of the prompt is told before anything else.
            assert not event.prompt_logprobs or len(self.tokens) == len(event.token_ids)
            self.prompt_logprobs += event.prompt_logprobs
            self.logprobs += event.logprobs


def finish(engine: Engine, requests: Sequence[Request]) -> list[Scored]:
    sinks = [Scored() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.step():
        pass
    engine.stepper.check()
    return sinks


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


@pytest.mark.parametrize(("which", "kind"), [*(("drafts", kind) for kind in KINDS), ("plain", "seeded"), ("ahead", "seeded")])
def test_prompts_are_scored_as_by_transformers_and_the_output_is_the_same(executors, theirs, which, kind):
    ends = run(executors[1], [asking(TEXT[:20])])[0].tokens[1]
    plain, scored = [], []
    for number, (length, first) in enumerate(PARTS):
        one = asking(TEXT[:length], name=f"plain {number}", max_tokens=TOKENS, **rules(kind, ends))
        plain.append(one)
        own = {"constraint": Automaton(turns)} if one.constraint else {}
        scored.append(replace(one, id=f"scored {number}", prompt_logprobs=MOST, prompt_logprobs_from=first, logprobs=1, **own))
    executor = executors[which == "plain"]
    with tiny.Launching(executor) if which == "ahead" else nullcontext(executor) as device:
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


@pytest.mark.parametrize("which", [0, 1], ids=["drafts", "plain"])
def test_nothing_is_generated_behind_a_prompt_if_nothing_is_wanted(executors, theirs, which):
    options = {"max_tokens": 0, "prompt_logprobs": 0}
    requests = [asking(TEXT[:n], name=f"{n} {first}", prompt_logprobs_from=first, **options) for n, first in PARTS]
    for request, outcome, (length, first) in zip(requests, finish(Engine(executors[which]), requests), PARTS, strict=False):
        assert (outcome.tokens, outcome.end.reason, outcome.end.completion_tokens, outcome.end.prompt_tokens) == ([], "length", 0, length)
        check(theirs, request.prompt, outcome.prompt_logprobs, first, 0)


def test_scores_survive_preemption(executors, theirs):
    """Pages for less than two of them: each is prefilled again with what had been scored."""
    executor = tiny.Narrowed(executors[0], executors[0].buckets, num_pages=executors[0].limits.pages_per_request + 2)
    requests = [asking(TEXT[n : n + 60], max_tokens=4, name=f"{n}", prompt_logprobs=1, prompt_logprobs_from=45) for n in (0, 3)]
    outcomes = finish(Engine(executor), requests)
    assert sum(outcome.end.record.preemptions for outcome in outcomes)
    for request, outcome in zip(requests, outcomes, strict=True):
        check(theirs, request.prompt, outcome.prompt_logprobs, 45, 1)
        assert outcome.end.record.first_token_ms > 0


def test_a_run_with_scores_can_be_repeated(executors):
    entries: list[list[Any]] = []
    engine = Engine(executors[0])
    engine.stepper.journal = Journal(lambda entry: entries.append(msgpack.unpackb(msgpack.packb(entry))))
    requests = [replace(asking(TEXT[:n], Automaton(turns), name=f"{n}"), prompt_logprobs=1) for n in (5, 9)]
    outcomes = finish(engine, requests)
    repeated = replay(Engine(executors[0]), entries)
    assert repeated.divergence is None
    assert repeated.tokens == sum(len(request.prompt) - 1 + len(one.tokens) for request, one in zip(requests, outcomes, strict=True))


def test_graphs_without_bitmasks_score_nothing(executors):
    def refused(executor: Executor, **options: Any) -> RequestError:
        with pytest.raises(RequestError) as caught:
            Engine(executor).submit(replace(asking(TEXT[:5]), **options), Outcome())
        assert caught.value.param == "prompt_logprobs"
        return caught.value

    assert "--structured-outputs" in str(refused(executors[2], prompt_logprobs=1))
    assert "from 1 to 5, the length of the prompt" in str(refused(executors[0], prompt_logprobs=1, prompt_logprobs_from=6))
    assert "0 to" in str(refused(executors[0], prompt_logprobs=21))


def test_what_is_kept_of_prefixes_is_what_was_scored(executors, theirs):
    """A prompt is read from the cache as far as nobody asks for its scores; what a scored one leaves there is what any would."""
    alone = run(executors[0], [asking(TEXT[:70], name="alone")])[0].tokens
    engine = Engine(executors[0], prefix_cache=PrefixCacheSettings())
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
