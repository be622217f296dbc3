"""All kinds of steps, and the inputs of one bucket's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import SpecError
from ..types import Aval, Bucket, Limits
from .decode import DECODE
from .encode import ENCODE
from .inputs import StepInput
from .kind import SegmentSizes, StepKind
from .prefill import PREFILL
from .score import SCORE

STEP_KINDS = {kind.name: kind for kind in (DECODE, PREFILL, ENCODE, SCORE)}

REQUEST_INPUTS = {field.name: field for kind in (PREFILL, DECODE) for field in kind.inputs}
"""All inputs of steps of requests."""


def kind_of(bucket: Bucket) -> StepKind:
    """The kind of a bucket's steps.

    Raises:
        SpecError: there is none of that name.
    """
    if bucket.kind not in STEP_KINDS:
        raise SpecError(f"bucket {bucket.name}: kind is {bucket.kind!r}; legal are {', '.join(STEP_KINDS)}")
    return STEP_KINDS[bucket.kind]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one bucket's graph, as abstract values or as tensors in which every row is padding.

    Attributes:
        logprobs: the graph returns log probabilities.
        segments: what a vision tower takes; None for steps of other kinds.
    """

    bucket: Bucket
    limits: Limits
    logprobs: bool = False
    segments: SegmentSizes | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the letters of dimensions."""
        return kind_of(self.bucket).sizes(self.bucket, self.limits, self.segments)

    def shapes(self, names: Sequence[str] = ()) -> list[tuple[StepInput, tuple[int, ...]]]:
        """The graph's inputs, or those of these names whether the graph has them or not, each with its shape."""
        sizes, own = self.sizes, {field.name: field for field in kind_of(self.bucket).inputs}
        known = REQUEST_INPUTS | own if names else own
        fields = (field for field in known.values() if (field.name in names if names else self._has(field)))
        return [(field, tuple(sizes[letter] for letter in field.dims)) for field in fields]

    def avals(self) -> dict[str, Aval]:
        """The abstract inputs that the graph is traced with."""
        return {field.name: Aval(shape, field.dtype) for field, shape in self.shapes()}

    def padding(self, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """New tensors in which every row is padding, of the inputs that `shapes` gives."""
        return {field.name: torch.full(shape, field.padding, dtype=field.dtype) for field, shape in self.shapes(names)}

    def _has(self, field: StepInput) -> bool:
        limits = self.limits
        offered = {"": True, "drafts": limits.drafts > 0, "logprobs": self.logprobs, "bitmasks": limits.bitmasks > 0}
        offered |= {"adjustments": limits.logit_adjustments > 0, "pictures": limits.picture_rows > 0}
        return offered[field.needs]
