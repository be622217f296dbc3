"""Golden tokens: prompts through the engine, beside what transformers answered (`prove/golden.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from ....graphs.errors import NpucompileError
from ....runtime.executor import Executor
from ....runtime.request import Sampling
from ...progress import Bar
from ...ranks.offline import OfflineCompletion, complete
from ..golden import Golden, GoldenPrompt, Top
from .results import BringupFailure

WHAT = "golden tokens"
MOST_TURNS = 4
"""How often a prompt is taken up again behind a token that was as good."""


class Allowed(NamedTuple):
    """How far an artifact may be from the float checkpoint.

    Attributes:
        tie: between two tokens, in log probability by transformers, up to which either may be taken.
        error: mean absolute difference of log probabilities, over the tokens that both list.
        overlap: least mean share of the most likely tokens that both list.
    """

    tie: float
    error: float
    overlap: float


FLOATS, QUANTISED = Allowed(0.5, 0.1, 0.7), Allowed(1.0, 0.25, 0.5)
"""A logit of 16 to 32 is rounded to 1/8 in bfloat16. A model of two layers was off by 0.02 in bfloat16 and in int8, and by 0.14 where
decode steps wrote nothing to their first pool."""


@dataclass
class _Found:
    """What prompts came to.

    Attributes:
        ties: places at which another token was taken that was as good.
        overlaps, errors: of each place with log probabilities.
        wrong: messages.
    """

    tokens: int = 0
    ties: list[str] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class _Turn(NamedTuple):
    """A prompt from one of its tokens on."""

    number: int
    golden: GoldenPrompt
    first: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.golden.prompt, *self.golden.tokens[: self.first])


def run_golden(executor: Executor, golden: Golden, allowed: Allowed, bar: Bar) -> tuple[list[BringupFailure], dict[str, Any], list[str]]:
    """Serves the prompts of a file that the artifact has room for; returns failures, facts and what was left out.

    Where the artifact takes another token the prompt goes on behind the golden one, if the two are as good as equal: all places are judged.
    """
    left_out = [f"log probabilities: the artifact returns none (build --max-logprobs {len(golden.prompts[0].top[0])})"]
    turns, found = [_Turn(i, each, 0) for i, each in enumerate(golden.prompts)], _Found()
    if golden.vocab_size > executor.vocab_size:
        message = f"the file is of a model of {golden.vocab_size} ids, the artifact of one of {executor.vocab_size}"
        return [BringupFailure("kernels", WHAT, message)], {}, []
    fits = [turn for turn in turns if len(turn.prompt) + len(turn.golden.tokens) <= executor.limits.max_model_len]
    left_out = left_out[: not executor.max_logprobs] + [
        f"prompt {turn.number}: longer than the context" for turn in turns if turn not in fits
    ]
    turns = fits
    for number in range(MOST_TURNS):
        if not turns:
            break
        try:
            answers = _answers(executor, turns, golden)
        except NpucompileError as error:
            return [BringupFailure.of("one-session", WHAT, error)], {}, left_out
        turns = [after for turn, answer in zip(turns, answers, strict=True) for after in _compared(turn, answer, allowed, found)]
        bar.step(f"turn {number + 1}")
    facts = {"prompts": len(fits), "golden_tokens": found.tokens, "ties": found.ties, **_means(found)}
    return [BringupFailure("kernels", WHAT, message) for message in _judged(found, allowed)], facts, left_out


def _answers(executor: Executor, turns: Sequence[_Turn], golden: Golden) -> list[OfflineCompletion]:
    """What the artifact answers, all at once for each number of tokens that are left."""
    listed = min(executor.max_logprobs, len(golden.prompts[0].top[0])) or None
    answers: dict[int, OfflineCompletion] = {}
    for left in sorted({len(turn.golden.tokens) - turn.first for turn in turns}):
        same = [turn for turn in turns if len(turn.golden.tokens) - turn.first == left]
        done = complete(executor, [turn.prompt for turn in same], Sampling(), left, frozenset(), logprobs=listed)
        answers |= {turn.number: answer for turn, answer in zip(same, done, strict=True)}
    return [answers[turn.number] for turn in turns]


def _compared(turn: _Turn, answer: OfflineCompletion, allowed: Allowed, found: _Found) -> Iterator[_Turn]:
    """Compares the places of an answer up to the first other token; what is to be asked next."""
    for place, (token, wanted) in enumerate(zip(answer.token_ids, turn.golden.tokens[turn.first :], strict=False), turn.first):
        found.tokens += 1
        top = turn.golden.top[place]
        if answer.logprobs:
            _measure(top, answer.logprobs[place - turn.first].top, found)
        if token == wanted:
            continue
        where = f"prompt {turn.number}, token {place}: {token} where transformers takes {wanted}"
        behind = top[0][1] - dict(top).get(token, float("-inf"))
        if behind > allowed.tie:
            less = f"less likely by {behind:.2f}" if token in dict(top) else f"not among its {len(top)} most likely"
            found.wrong.append(f"{where}, for which the first is {less}")
            return
        found.ties.append(f"{where}, {behind:.2f} less likely")
        if place + 1 < len(turn.golden.tokens):
            yield _Turn(turn.number, turn.golden, place + 1)
        return


def _measure(theirs: Top, ours: Top, found: _Found) -> None:
    mine, same = dict(ours), [(token, logprob) for token, logprob in theirs if token in dict(ours)]
    found.overlaps.append(len(same) / min(len(theirs), len(ours)))
    if same:
        found.errors.append(fmean(abs(logprob - mine[token]) for token, logprob in same))


def _means(found: _Found) -> dict[str, float]:
    return {name: fmean(values) for name, values in (("overlap", found.overlaps), ("logprob_error", found.errors)) if values}


def _judged(found: _Found, allowed: Allowed) -> list[str]:
    """What is wrong of all."""
    means, wrong = _means(found), found.wrong[:3]
    if found.errors and means["logprob_error"] > allowed.error:
        wrong.append(f"log probabilities are off by {means['logprob_error']:.3f} on average; legal is {allowed.error}")
    if found.overlaps and means["overlap"] < allowed.overlap:
        wrong.append(f"{means['overlap']:.0%} of the most likely tokens are the same; legal is {allowed.overlap:.0%}")
    return wrong
