"""Steps at other sizes: some of their rows, with more or less padding.

An artifact whose executables take any size serves before it has them (`CpuExecutor`): then rows go through a bucket of the eager graphs, as
many at a time as it holds. Rows of a step have nothing in common, so it makes no difference which of them run together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..graphs.errors import SpecError
from ..graphs.step_inputs import LEAST_CHUNK, OPTIONAL_ROWS, StepInputs
from ..graphs.types import Bucket, Limits
from .buckets import DTYPES, Arrays
from .executor import Inputs


class WholeStep(NamedTuple):
    """A part of a step: the rows of it that run in a bucket, and the inputs of this."""

    bucket: Bucket
    rows: range
    inputs: Arrays


def whole_steps(of: Bucket, inputs: Inputs, buckets: Collection[Bucket], limits: Limits, *, logprobs: bool) -> Iterator[WholeStep]:
    """The rows of a step, which counts as one of a bucket, in the bucket that has least padding for them.

    Raises:
        SpecError: no bucket holds its longest row.
    """
    rows = len(inputs["request_slots"])
    longest = int(inputs["query_lens"].max()) if of.kind == "prefill" else of.q_len
    holding = [b for b in buckets if b.kind == of.kind and (b.q_len == longest or (b.q_len > longest and b.kind == "prefill"))]
    if not holding:
        raise SpecError(f"a {of.kind} row of {longest} tokens; legal is what one of {', '.join(b.name for b in sorted(buckets))} holds")
    bucket = min(holding, key=lambda b: (-(-rows // b.batch) * b.tokens, b))
    for first in range(0, rows, bucket.batch):
        part = range(first, min(first + bucket.batch, rows))
        yield WholeStep(bucket, part, resized(inputs, part, StepInputs(bucket, limits, logprobs)))


def long_enough(kind: str, inputs: Inputs, limits: Limits, *, logprobs: bool) -> Inputs:
    """A step whose sizes are values, with as many tokens a row as its executable takes at least."""
    if kind != "prefill" or inputs["tokens"].shape[1] >= LEAST_CHUNK:
        return inputs
    rows = range(len(inputs["tokens"]))
    return resized(inputs, rows, StepInputs(Bucket(kind, len(rows), LEAST_CHUNK), limits, logprobs))


def resized(inputs: Inputs, rows: Sequence[int], sizes: StepInputs) -> Arrays:
    """Some rows of a step as the first rows of one of other sizes, all of which hold their tokens.

    What only a few rows have is numbered anew.
    """
    whole, taken = dict(inputs), list(rows)
    for name, whose in OPTIONAL_ROWS.items():
        if name in inputs:
            used = np.unique(np.concatenate([inputs[places][taken] for places in whose]))
            used = used[used > 0]
            whole |= {places: np.where(inputs[places] > 0, np.searchsorted(used, inputs[places]) + 1, 0) for places in whose}
            whole[name] = inputs[name][used - 1]
    result: Arrays = {}
    for field, shape in sizes.shapes():
        given = whole[field.name] if field.name in OPTIONAL_ROWS else whole[field.name][taken]
        result[field.name] = np.full(shape, field.padding, DTYPES[field.dtype])
        both = tuple(slice(min(of, to)) for of, to in zip(given.shape, shape, strict=True))
        result[field.name][both] = given[both]
    return result
