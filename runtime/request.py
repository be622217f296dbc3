"""The records that pass between the server and the engine: requests in, token and finish events out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..graphs.errors import RequestError
from .constraint import Constraint
from .picture_spans import PictureInput

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Smallest and largest legal values of sampling parameters."""

SMALLEST_TOP_P = 2.0**-126
"""The smallest normal number of float32."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are picked.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely one; 0 keeps all.
        seed: of the request's own random numbers; None draws one at submission.
        presence_penalty: subtracted from the logits of tokens that are in the output, from -2 to 2.
        frequency_penalty: subtracted as often as the output has the token, from -2 to 2.
        repetition_penalty: of tokens in prompt or output positive logits are divided by it and others multiplied; 1 changes nothing.
        logit_bias: (token id, from -100 to 100) pairs, added to the logits of the tokens.
        min_tokens: before this many tokens are generated, none that would end the output is sampled.
        allowed_token_ids: the only tokens that are sampled; None allows all.
        bad_words: sequences of tokens whose last one is not sampled where the output ends in those before it, as vLLM's `bad_words`
            (vllm/v1/sample/ops/bad_words.py).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k is {self.top_k!r}; legal is a whole number from 0 to {2**31 - 1}", param="top_k")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not _within(value, low, high):
                raise RequestError(f"{name} is {value!r}; legal is a number from {low} to {high}", param=name)
        for token, bias in self.logit_bias:
            if not _within(bias, -100.0, 100.0):
                message = f"logit_bias of token {token} is {bias!r}; legal is a number from -100.0 to 100.0"
                raise RequestError(message, param="logit_bias")
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; legal is above 0 up to 1", param="top_p")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RequestError(f"seed is {self.seed!r}; legal is an integer or null", param="seed")
        if type(self.min_tokens) is not int or self.min_tokens < 0:
            raise RequestError(f"min_tokens is {self.min_tokens!r}; legal is a whole number of at least 0", param="min_tokens")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; legal is at least one token id, or null", param="allowed_token_ids")
        if not all(self.bad_words):
            raise RequestError("bad_words holds a word of no tokens; legal are words of at least 1", param="bad_words")

    @property
    def penalises_output(self) -> bool:
        """Whether tokens of the output are less likely, or more, for being there."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalises(self) -> bool:
        """Whether tokens of output or prompt are less likely, or more, for being there."""
        return self.penalises_output or self.repetition_penalty != 1

    @cached_property
    def adjusts(self) -> bool:
        """Whether a step needs adjustments of logits (runtime/adjustments.py)."""
        return self.penalises or bool(self.logit_bias)

    @cached_property
    def filters(self) -> tuple[float, int, float, float]:
        """temperature, top_k, top_p and min_p as a step takes them."""
        # A top_p that float32 rounds to 0 would keep no token; the smallest keeps the most likely, as it should.
        return self.temperature, self.top_k, max(self.top_p, SMALLEST_TOP_P), self.min_p


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


class HostInputs(NamedTuple):
    """How many of the inputs that a step has for a few of its rows one row needs, or all may have.

    Attributes:
        bitmasks: of what may be sampled.
        adjustments: of logits, each with a number for every token.
        seen: sets of tokens seen.
    """

    bitmasks: int = 0
    adjustments: int = 0
    seen: int = 0

    def less(self, other: HostInputs) -> HostInputs | None:
        """What is left of these without others; None where they are fewer."""
        left = HostInputs(*(mine - its for mine, its in zip(self, other, strict=True)))
        return left if min(left) >= 0 else None


NO_INPUTS = HostInputs()

SEND, RECEIVE = "send", "receive"
"""Of `Request.handover`: what a prefill server does with a prompt, and a decode server."""


@dataclass(frozen=True)
class Request:
    """One prompt to be completed.

    Attributes:
        id: unique among live requests.
        prompt: token ids, at least one.
        max_tokens: most tokens to generate; 0 computes the prompt and generates nothing.
        stop_token_ids: ids that end the output (the end-of-sequence ids are among them unless ignored).
        logprobs: number of most likely tokens to return log probabilities of, besides the chosen token's; None returns none at all.
        speculative_tokens: most drafts to verify in a step; 0 is off, None is as many as the graphs draft. It changes the speed and
            never the tokens.
        constraint: what the output may be; None leaves it free.
        priority: lower is served first.
        tenant: whose request it is; tenants take turns (`scheduler/turns.py`).
        timeout_ms: how long after its submission it ends, whatever it has generated; None lets it run.
        first_token_timeout_ms: how long after its submission it ends if no token has been sampled.
        cache_salt: whose prefixes it shares: it finds those of requests with the same salt alone, and they find its own.
        skip_reading_prefix_cache: compute the whole prompt, whatever is known of it.
        prompt_logprobs: `logprobs` of tokens of the prompt, which come before those of the output; None returns none.
        prompt_logprobs_from: the first position of the prompt whose log probability is returned; at least 1, as nothing comes before
            position 0.
        handover: SEND computes all of the prompt but its last token, and keeps it until the request is cancelled; RECEIVE gets pages and
            slots for it, and begins with that token once they are filled (`Landed`). Each says so by a `ParkedEvent`. "" does neither.
        waited_ms: how long before its submission it came in, because its prompt was computed elsewhere.
        pictures: of the prompt, in order of their places; its last token is none of theirs.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    speculative_tokens: int | None = None
    constraint: Constraint | None = field(default=None, compare=False)
    priority: int = 0
    tenant: str = ""
    timeout_ms: float | None = None
    first_token_timeout_ms: float | None = None
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    handover: str = ""
    waited_ms: float = 0.0
    pictures: tuple[PictureInput, ...] = field(default=(), compare=False)

    @property
    def num_scored(self) -> int:
        """Tokens at the prompt's end whose log probabilities are returned. Decode steps compute them, one position after another, as if
        they were sampled and nothing else could be; only what comes before is prefilled, or found computed."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - self.prompt_logprobs_from

    @cached_property
    def longest(self) -> int:
        """Most tokens of prompt and output."""
        return len(self.prompt) + self.max_tokens

    @cached_property
    def plain(self) -> bool:
        """Whether its steps need nothing from the host but sampling parameters: no grammar, bias, penalty, minimum length or scored
        prompt. A step need not wait for the tokens of the one before it."""
        sampling = self.sampling
        rules = self.constraint is not None or sampling.allowed_token_ids is not None or sampling.bad_words or sampling.min_tokens
        return not (rules or sampling.adjusts or self.prompt_logprobs is not None)

    def restricted(self, count: int) -> bool:
        """Whether some tokens may not follow an output of at least `count` tokens, so that a step needs a bitmask.

        Args:
            count: negative while so many tokens of the prompt are still to be scored.
        """
        if count < 0:
            return True
        sampling = self.sampling
        return self.constraint is not None or sampling.allowed_token_ids is not None or bool(sampling.bad_words) or self.cannot_end(count)

    def follows_output(self, count: int) -> bool:
        """Whether what may follow an output of at least `count` tokens depends on these tokens or their number: they must be known."""
        several = any(len(word) > 1 for word in self.sampling.bad_words)
        return count < 0 or self.constraint is not None or several or self.sampling.penalises or self.cannot_end(count)

    def host_inputs(self, count: int) -> HostInputs:
        """What a step of it needs behind at least `count` tokens of output."""
        sampling = self.sampling
        tables = bool(sampling.logit_bias) + sampling.penalises_output
        return HostInputs(int(self.restricted(count)), tables, int(sampling.repetition_penalty != 1))

    def cannot_end(self, count: int) -> bool:
        """Whether an output of at least `count` tokens may still be too short to be ended by a token."""
        return count < self.sampling.min_tokens and bool(self.stop_token_ids)


class DecodedRow(NamedTuple):
    """A request's row of a decode step: the bucket, its rows of padding, drafts that were verified, and how many of them accepted."""

    bucket_name: str
    padded_rows: int
    num_drafts: int
    accepted: int


class ExecutionRecord(NamedTuple):
    """How one request was served: its times, steps and drafts.

    Attributes:
        queue_ms: from submission to first step.
        first_token_ms: from submission to first token; None when no token was produced.
        total_ms: from submission to the end.
        prefill_chunks: bucket names of the prefill steps, in order.
        decode_steps: (bucket name, steps) pairs, sorted by name.
        padded_rows: rows of padding in the request's steps, summed over them.
        preemptions: how often the request lost its pages and was prefilled again.
        cached_tokens: prompt tokens whose prefill was skipped.
        cache_write_tokens: prompt tokens that are kept for later requests, and were not before.
        verify_steps: decode steps in which drafts were verified.
        drafted_tokens: drafts verified.
        accepted_per_position: how often the first, second, ... draft of a step was accepted; as long as the graphs' drafts.
        encoded_pictures: of its pictures, and frame pairs of videos, how many were encoded for it and not for another request before.
    """

    queue_ms: float = 0.0
    first_token_ms: float | None = None
    total_ms: float = 0.0
    prefill_chunks: tuple[str, ...] = ()
    decode_steps: tuple[tuple[str, int], ...] = ()
    padded_rows: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    cache_write_tokens: int = 0
    encoded_pictures: int = 0

    def decoded(self, rows: Iterable[DecodedRow]) -> ExecutionRecord:
        """The record after these rows of decode steps."""
        steps, places = Counter(dict(self.decode_steps)), list(self.accepted_per_position)
        padded, verified, drafted = self.padded_rows, self.verify_steps, self.drafted_tokens
        for row, times in Counter(rows).items():
            steps[row.bucket_name] += times
            padded += times * row.padded_rows
            verified += times * (row.num_drafts > 0)
            drafted += times * row.num_drafts
            for place in range(min(row.accepted, len(places))):
                places[place] += times
        return self._replace(
            decode_steps=tuple(sorted(steps.items())),
            padded_rows=padded,
            verify_steps=verified,
            drafted_tokens=drafted,
            accepted_per_position=tuple(places),
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of the steps in which drafts were verified; None without such steps."""
        return 1 + sum(self.accepted_per_position) / self.verify_steps if self.verify_steps else None


class Logprobs(NamedTuple):
    """Log probabilities of one generated token, from the model's distribution before temperature and the other sampling parameters.

    Attributes:
        logprob: natural logarithm of the chosen token's probability.
        top: (token id, log probability) of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenEvent(NamedTuple):
    """New tokens of one request.

    Attributes:
        logprobs: of each token if the request asks for them, else empty.
        prompt_logprobs: of the next tokens of the prompt, which come before the first token, if the request asks for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


class ParkedEvent(NamedTuple):
    """A request holds the pages of its prompt and is not scheduled: a handover reads them, or fills them.

    Attributes:
        group: dp group whose pages and slot these are.
        pages: of all tokens of the prompt but the last, in order of position.
        slot: the state slot of the recurrent state before the last token.
        known: how many of the pages are filled already.
        token_ids: all tokens that are known: the prompt, and the output of a request that lost its pages.
    """

    request_id: str
    group: int = 0
    pages: tuple[int, ...] = ()
    slot: int = 0
    known: int = 0
    token_ids: tuple[int, ...] = ()


FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")


@dataclass(frozen=True)
class FinishEvent:
    """The end of one request; nothing follows it.

    Attributes:
        reason: one of FINISH_REASONS.
        message: the error, for the reasons "error" and "timeout".
        code: of an error that is the request's own; None where it is the engine's.
        ended_by: the token that ended the output and is in no TokenEvent, with its log probability, if the request asks for those of
            output and prompt: who adds them up counts positions.
    """

    request_id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    record: ExecutionRecord
    message: str | None = None
    ended_by: tuple[int, Logprobs] | None = None
    code: str | None = None


Event = TokenEvent | FinishEvent


class Flush:
    """An order to forget all prefixes."""


class Landed(NamedTuple):
    """The pages and the state of a parked request are filled, so it can begin with the last token of its prompt; or nobody fills them,
    and it gives them back and is computed like any other request."""

    arrival: int
    filled: bool = True
