"""The record of a kind of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import SpecError
from ..types import Bucket, Limits
from .inputs import StepInput


class StepOutput(NamedTuple):
    """One output of a step.

    Attributes:
        dims: letters of `StepKind.sizes`, or "?" for a size that depends on what the graph was built for. With "Q" it has a place for
            each new token of a row, and padding in those behind the row's own (`StepKind.live`).
        kind: of its dtype, as numpy has it: "i" or "f", of 32 bits.
        asked: inputs by which rows ask for it; the host reads it where one of them is not zero. () is read always, and None never: it is
            there for proofs.
    """

    name: str
    dims: str
    kind: str
    asked: tuple[str, ...] | None = ()


SAMPLED = (
    StepOutput("tokens", "BW", "i"),
    # What a row may sample next depends on them.
    StepOutput("drafts", "B?", "i", ("bitmask_rows", "penalty_rows", "seen_rows")),
    StepOutput("chosen_logprobs", "BW", "f", ("logprobs",)),
    StepOutput("top_ids", "BW?", "i", ("logprobs",)),
    StepOutput("top_logprobs", "BW?", "f", ("logprobs",)),
    StepOutput("experts", "B???", "i"),
    StepOutput("logits", "BW?", "f", None),
)
"""What steps give that sample tokens."""


MOST_TOLD = 256
"""Where experts should lie follows from so many tokens as well, and the host counts them beside a step."""

OF_REQUESTS = ("pages", "slots", "first_slots", "request_slots")
"""First axes of the pools that have places of one request."""


class SegmentSizes(NamedTuple):
    """What steps of a vision tower take.

    Attributes:
        patch_dim: values of a patch, of all its channels and frames.
        merged: patches that become one row.
    """

    patch_dim: int
    merged: int


@dataclass(frozen=True)
class StepKind:
    """A kind of steps: what its buckets are, and what a step of one reads and gives.

    Attributes:
        name: in names of buckets and in artifacts, and of the method of models/step.py that is its program.
        batch: what `Bucket.batch` counts.
        inputs: in the order of a graph's leaves.
        outputs: that its steps may have.
        reads, writes: first axes of the pools of state where a row reads, and writes, places of its own; padding writes place 0.
        sizes: of the letters of its dimensions, for a bucket under limits; and of what a vision tower takes.
        sampled: W, tokens that a step of a bucket samples per row; 0 where it samples none.
        check: refuses a row that does not fit, with a SpecError; arguments are the row, bucket and limits, and its `sizes`.
        cost: what a step of a bucket costs, in tokens or patches, with what every step costs whatever its size in the same unit.
        decodes: rows go on from request slots, so that streams wait for the next of these steps, and prompts for one of another kind.
        tower: its program is that of a vision tower: it reads the tower's parameters, writes rows of pictures, and nothing else.
        ragged: a row may have fewer than Q, the others being padding.
        dynamic: letters whose sizes may be values of a step, where executables take any.
        least: the smallest Q of such a step.
    """

    name: str
    batch: str
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sizes: Callable[[Bucket, Limits, SegmentSizes | None], Mapping[str, int]]
    sampled: Callable[[Bucket], int]
    check: Callable[[Any, Bucket, Limits, Mapping[str, int]], None]
    cost: Callable[[Bucket, float], float]
    decodes: bool = False
    tower: bool = False
    ragged: bool = True
    dynamic: str = ""
    least: int = 1

    @property
    def padding(self) -> Mapping[str, float]:
        """Value of each input in rows of padding."""
        return {field.name: field.padding for field in self.inputs}

    @property
    def samples(self) -> bool:
        """Whether its steps sample tokens."""
        return any(output.name == "tokens" for output in self.outputs)

    @property
    def chunks(self) -> bool:
        """Whether its rows are chunks of prompts."""
        return self.samples and not self.decodes

    @cached_property
    def wide(self) -> frozenset[str]:
        """Names of the outputs with a place for each new token of a row."""
        return frozenset(output.name for output in self.outputs if "Q" in output.dims)

    def live(self, name: str, count: int) -> tuple[slice, ...]:
        """Where in a row's part of an output is what a row of so many new tokens has; behind it is padding."""
        return (slice(count),) if name in self.wide else ()

    def bucket(self, batch: int, q_len: int) -> Bucket:
        """A bucket of this kind."""
        return Bucket(self.name, batch, q_len)

    def among(self, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
        """Those of this kind, smallest first."""
        return tuple(sorted(bucket for bucket in buckets if bucket.kind == self.name))

    def needed(self, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
        """The same where there must be one.

        Raises:
            SpecError: there is none.
        """
        buckets = tuple(buckets)
        if not (own := self.among(buckets)):
            raise SpecError(f"no {self.name} bucket among {[b.name for b in buckets]}; serving needs at least one of each kind")
        return own

    def fits(self, bucket: Bucket, q_len: int) -> bool:
        """Whether rows of so many new tokens or patches run in this bucket of the kind."""
        return bucket.q_len == q_len or (self.ragged and bucket.q_len > q_len)


def check_request(row: Any, end: int, limits: Limits) -> None:
    """Refuses the row of a request whose slot or pages are not legal.

    Args:
        end: the position behind the last token that the step may write.

    Raises:
        SpecError: naming what is legal.
    """
    if end > len(row.pages) * limits.page_size:
        raise SpecError(f"a row ends at position {end}; its {len(row.pages)} pages of {limits.page_size} tokens end before")
    if not 1 <= row.request_slot < limits.num_request_slots:
        raise SpecError(f"a row with request slot {row.request_slot}; legal is 1 to {limits.num_request_slots - 1}")
    if len(row.pages) > limits.pages_per_request:
        raise SpecError(f"{len(row.pages)} pages for one row; the page table holds {limits.pages_per_request}")


def tokens_told(q_len: int) -> int:
    """Of how many tokens of a row steps return the experts, where they do: of all, or at even distances of no more than MOST_TOLD."""
    return next(count for count in range(min(q_len, MOST_TOLD), 0, -1) if q_len % count == 0)


def price(bucket: Bucket, fixed_tokens: float) -> float:
    """What a step costs, in tokens: those that it is padded to, and `fixed_tokens` for reading the weights, as every step does.

    A step has products that wait for their weights and products that wait for arithmetic, so the larger of both decides, smoothly: it is
    a 2-norm.
    """
    return math.hypot(fixed_tokens, bucket.tokens)
