"""runtime/adjustments.py: biases and penalties change output as transformers' processors do, drafts or not, beside other requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support import tiny
from support.constrained import PROMPTS, Automaton, asking, run, turns
from support.toy_device import Collector
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime import adjustments
from npucompile.runtime.adjustments import Adjustment
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Sampling

TOKENS = 64
THREE = PROMPTS[:3]


class OutputPenalties(LogitsProcessor):
    """OpenAI's: `mu[j] - c[j] * frequency - (c[j] > 0) * presence`, with c the counts of the output."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt :].tolist()).items():
            scores[0, token] -= count * self.sampling.frequency_penalty + self.sampling.presence_penalty
        return scores


@torch.no_grad()
def expected(theirs: Any, prompt: bytes, sampling: Sampling) -> list[int]:
    """Greedy tokens of transformers with its processors, in vLLM's order."""
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): value for token, value in sampling.logit_bias}))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(OutputPenalties(sampling, len(prompt)))
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(ids, logits_processor=processors, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def free(executors):
    return [outcome.tokens for outcome in run(executors[1], [wanting(prompt, Sampling()) for prompt in THREE])]


def wanting(prompt: bytes, sampling: Sampling, **options):
    return asking(prompt, sampling=sampling, max_tokens=TOKENS, stop_token_ids=frozenset(), **options)


def kinds(tokens: list[int]) -> dict[str, Sampling]:
    """Sampling parameters that change an output of these tokens."""
    bias = ((tokens[0], -100.0), (tokens[2], -3.0), (65, 4.0))
    return {
        "bias": Sampling(logit_bias=bias),
        "presence": Sampling(presence_penalty=2.0),
        "frequency": Sampling(frequency_penalty=0.7),
        "wanted": Sampling(presence_penalty=-1.5, frequency_penalty=-0.5),
        "repetition": Sampling(repetition_penalty=1.3),
        "all": Sampling(logit_bias=bias, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
    }


@pytest.mark.parametrize("kind", kinds([0] * 3))
@pytest.mark.short_cases("all")
def test_greedy_output_is_that_of_transformers(executors, theirs, free, kind):
    """More requests than a step has adjustments of, beside free ones; with drafts, without, and with steps launched ahead."""
    asked = [kinds(tokens)[kind] for tokens in free]
    want = [expected(theirs, prompt, sampling) for prompt, sampling in zip(THREE, asked, strict=True)]
    if kind != "wanted":
        assert all(tokens != alone for tokens, alone in zip(want, free, strict=True))
    requests = [wanting(prompt, sampling) for prompt, sampling in zip(THREE, asked, strict=True)]
    others = [wanting(prompt, Sampling(), name=f"free {i}") for i, prompt in enumerate(THREE)]
    accepted, ahead = 0, [tiny.Launching(executors[0])] if kind == "all" else []
    for executor in (*executors[:2], *ahead):
        outcomes = run(executor, [request for pair in zip(requests, others, strict=True) for request in pair])
        assert [outcome.tokens for outcome in outcomes[::2]] == want
        assert [outcome.tokens for outcome in outcomes[1::2]] == free
        accepted += sum(sum(outcome.end.record.accepted_per_position) for outcome in outcomes[::2])
    # Drafts are verified under the penalties, and some of them hold.
    assert accepted > 0


def test_sampled_output_is_the_same_with_drafts(executors):
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=3, presence_penalty=1.0, repetition_penalty=1.1)
    both = [[o.tokens for o in run(e, [wanting(prompt, sampling) for prompt in THREE])] for e in executors[:2]]
    assert both[0] == both[1]


@pytest.mark.parametrize(("sampling", "ahead"), [(Sampling(logit_bias=((1, 1.0),)), True), (Sampling(frequency_penalty=0.1), False)])
def test_a_bias_waits_for_nothing(executors, sampling, ahead):
    with tiny.Launching(executors[0]) as executor:
        run(executor, [wanting(PROMPTS[0], sampling)])
    assert (executor.most_in_flight > 1) == ahead


def test_a_grammar_masks_what_was_adjusted(executors):
    """No bias makes a token legal, and none that is forbidden by a grammar is lost to arithmetic."""
    sampling = Sampling(logit_bias=((ord("5"), 100.0), (ord("q"), 100.0)), repetition_penalty=100.0, presence_penalty=2.0)
    for executor in executors[:2]:
        (outcome,) = run(executor, [asking(PROMPTS[0], Automaton(turns), sampling=sampling)])
        assert all(token in turns(outcome.tokens[:i]) for i, token in enumerate(outcome.tokens))
        assert len(outcome.tokens) == 16


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        (
            {"logit_bias": ((1, 2.0),)},
            "logit_bias",
            "logit_bias take 1 adjustments of logits, and these graphs take 0; legal is a build with",
        ),
        ({"presence_penalty": 1.0}, "presence_penalty", "--logit-adjustments 1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "--logit-adjustments 1"),
        ({"logit_bias": ((1, 2.0),), "frequency_penalty": 1}, "logit_bias", "--logit-adjustments 2"),
        ({"logit_bias": ((260, 2.0),)}, "logit_bias", "0 to 259"),
    ],
)
def test_what_graphs_do_not_take_is_refused_by_name(executors, sampling, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        Engine(executors[2]).submit(asking(PROMPTS[0], sampling=Sampling(**sampling)), Collector())
    assert caught.value.param == param


def test_a_step_takes_no_more_than_it_was_built_for():
    limits = Limits(16, 9, 9, 64).with_adjustments(3, 40)
    arrays = {name: value.numpy() for name, value in StepInputs(Bucket("decode", 4, 1), limits).padding().items()}
    both = Adjustment(arrays["adjustments"][0, 0], arrays["adjustments"][0, 0])
    with pytest.raises(SpecError, match="the step takes 3"):
        adjustments.fill(arrays, [(0, both), (2, both)])
