"""The sizes that scheduling decisions depend on, and how many pages a request needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graphs.errors import SpecError
from ...graphs.steps.decode import DECODE
from ...graphs.steps.encode import ENCODE
from ...graphs.steps.kind import StepKind
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.score import SCORE
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket, Limits
from ..steps.sizes import default_fixed_tokens
from .request_state import RequestState


@dataclass(frozen=True)
class Policy:
    """Limits and buckets of the executor, and how prefill and decode steps alternate.

    Attributes:
        limits: of one dp group.
        prefill_burst: most prefill and encode steps between two decode steps while any request decodes.
        measured: whether measured times of steps (`step_times.py`) decide which prompts share a step.
        itl_target_ms: how long the time between two tokens of a stream should be at most; prefill between two decode steps gets what
            a decode step leaves of it, instead of `prefill_burst` steps. None sets no such target. Only if times are measured.
        fixed_tokens: what every step costs whatever its size, in tokens (`lowering/artifact/fixed_cost.py`); None where nobody knows.
        any_size: kinds of steps that take any rows, and of chunks tokens a row: a step has what its requests need, and nothing is padded
            but by unequal chunks. Of one dp group.
        ageing: how many times a prompt's tokens may be admitted past it, before it is next whatever its priority (`turns.py`).

    Raises:
        SpecError: when a request of max_model_len could never be served, there is no bucket, or a decode bucket or, where there is one,
            the state slots of a request do not fit the drafts. A server of one kind of bucket does its part of handovers alone.
    """

    limits: Limits
    buckets: tuple[Bucket, ...]
    prefill_burst: int = 1
    measured: bool = False
    itl_target_ms: float | None = None
    fixed_tokens: float | None = None
    ageing: int = 16
    any_size: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        limits = self.limits
        if self.prefill_burst < 1:
            raise SpecError(f"prefill_burst is {self.prefill_burst}; legal is at least 1")
        if self.itl_target_ms is not None and not (self.measured and self.itl_target_ms > 0):
            raise SpecError(f"itl_target_ms is {self.itl_target_ms} and measured is {self.measured}; legal is above 0 with measured times")
        if self.ageing < 1:
            raise SpecError(f"ageing is {self.ageing}; legal is at least 1")
        if limits.num_pages - 1 < limits.pages_per_request:
            raise SpecError(
                f"{limits.num_pages} pages leave {limits.num_pages - 1} beside the null page; one request of max_model_len "
                f"{limits.max_model_len} takes {limits.pages_per_request}, so legal is at least {limits.pages_per_request + 1}"
            )
        if not self.buckets:
            raise SpecError("there is no bucket; legal is at least one, and of both kinds where nothing is handed over")
        decode = DECODE.among(self.buckets)
        if decode and limits.slots_per_request != self.candidates:
            raise SpecError(
                f"{limits.slots_per_request} state slots per request with {limits.drafts} drafts; decoding needs {self.candidates}, "
                "one for each candidate token"
            )
        if limits.num_slots - 1 < limits.slots_per_request:
            raise SpecError(
                f"{limits.num_slots} state slots leave {limits.num_slots - 1} beside the null slot; one request takes "
                f"{limits.slots_per_request}, so legal is at least {limits.slots_per_request + 1}"
            )
        for bucket in decode:
            if bucket.q_len > self.candidates:
                drafts = f"with {limits.drafts} drafts, legal is up to {self.candidates}"
                raise SpecError(f"bucket {bucket.name} decodes {bucket.q_len} tokens per request; {drafts}")

    @property
    def max_prompts(self) -> int:
        """Most prompts of one group in a step; 0 without a prefill bucket."""
        if PREFILL.name in self.any_size:
            return min(self.most_tokens(PREFILL), self.limits.num_request_slots - 1)
        return max((bucket.batch for bucket in (*self.prefill_buckets, *SCORE.among(self.buckets))), default=0)

    @functools.cached_property
    def fixed_price(self) -> float:
        """What every step costs whatever its size, in tokens, where no times are measured."""
        return default_fixed_tokens(self.buckets) if self.fixed_tokens is None else self.fixed_tokens

    def price(self, bucket: Bucket) -> float:
        """What a step costs, in tokens, where no times are measured."""
        return kind_of(bucket).cost(bucket, self.fixed_price)

    @functools.cached_property
    def prefill_buckets(self) -> tuple[Bucket, ...]:
        """Those of prefill steps, smallest first."""
        return PREFILL.among(self.buckets)

    @functools.cached_property
    def encode_buckets(self) -> tuple[Bucket, ...]:
        """Those of encode steps, smallest first."""
        return tuple(sorted(ENCODE.among(self.buckets), key=lambda bucket: (bucket.tokens, bucket)))

    def longest_chunk(self, *kinds: StepKind) -> int:
        """Most tokens of one prompt in a step of these kinds."""
        return max(bucket.q_len for kind in kinds for bucket in kind.among(self.buckets))

    def most_tokens(self, kind: StepKind) -> int:
        """Most tokens of a step of a kind, padding included."""
        return max(bucket.tokens for bucket in kind.among(self.buckets))

    def least_tokens(self, kind: StepKind) -> int:
        """Tokens of a step of any size of a kind that costs hardly more than one of a single token."""
        return min(max(int(self.fixed_price / 2), 1), self.most_tokens(kind))

    def holding(self, sizes: Bucket) -> Bucket:
        """The bucket that a step of these sizes counts as: the smallest of its kind with as many tokens."""
        return min((b for b in kind_of(sizes).needed(self.buckets) if b.tokens >= sizes.tokens), key=lambda b: (b.tokens, b))

    @functools.cached_property
    def cheapest_prefill(self) -> float:
        """What the smallest prefill step costs, in tokens."""
        if PREFILL.name in self.any_size:
            return self.price(PREFILL.bucket(1, self.least_tokens(PREFILL)))
        return min(map(self.price, self.prefill_buckets))

    def drafts(self, request: RequestState) -> int:
        """Drafts that the next decode step of the request can verify: of those that the step before it drafts, as many as it wants."""
        return min(request.drafted, self.wanted_drafts(request))

    def wanted_drafts(self, request: RequestState) -> int:
        """Drafts of the request that steps verify at most."""
        most = request.request.speculative_tokens
        return self.limits.drafts if most is None else min(most, self.limits.drafts)

    @functools.cached_property
    def buckets_by_width(self) -> Mapping[int, Sequence[Bucket]]:
        """Decode buckets by tokens a request, smallest first."""
        decode = DECODE.among(self.buckets)
        return {width: [b for b in decode if b.q_len == width] for width in sorted({b.q_len for b in decode})}

    @functools.cached_property
    def varies(self) -> bool:
        """Whether decode buckets are of several widths."""
        return len(self.buckets_by_width) > 1

    @property
    def candidates(self) -> int:
        """Q of decode: a request's last token and its drafts."""
        return self.limits.drafts + 1

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens of one request, at most a full context."""
        return -(-min(tokens, self.limits.max_model_len) // self.limits.page_size)

    def pages_to_prefill(self, request: RequestState) -> int:
        """Pages for all tokens of the request, and for the candidates drafted after them."""
        return self.pages_for(request.num_tokens + self.candidates)

    def pages_to_decode(self, request: RequestState) -> int:
        """Pages for the next decode step: its latest possible start, all candidates, and the drafts written after them."""
        Q = self.candidates
        return self.pages_for(request.num_computed_tokens + request.steps_in_flight * Q + 2 * Q - 1)
