"""Steps at other sizes: some of their rows, with more or less padding.

An artifact whose executables take any size serves before it has them (`CpuExecutor`): then rows go through a bucket of the eager graphs, as
many at a time as it holds. Rows of a step have nothing in common, so it makes no difference which of them run together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...graphs.errors import SpecError
from ...graphs.steps.inputs import OPTIONAL_ROWS
from ...graphs.steps.table import StepInputs, kind_of
from ...graphs.types import Bucket, Limits
from ..executor import Inputs
from .pack import DTYPES, Arrays


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
    kind, rows = kind_of(of), len(inputs["request_slots"])
    longest = int(inputs["query_lens"].max()) if kind.ragged else of.q_len
    holding = [b for b in kind.among(buckets) if kind.fits(b, longest)]
    if not holding:
        raise SpecError(f"a {of.kind} row of {longest} tokens; legal is what one of {', '.join(b.name for b in sorted(buckets))} holds")
    bucket = min(holding, key=lambda b: (-(-rows // b.batch) * b.tokens, b))
    for first in range(0, rows, bucket.batch):
        part = range(first, min(first + bucket.batch, rows))
        yield WholeStep(bucket, part, resized(inputs, part, StepInputs(bucket, limits, logprobs)))


def sizes_of(bucket: Bucket, inputs: Inputs) -> Bucket:
    """The rows, and tokens a row, of a step whose sizes are values and that counts as one of a bucket."""
    width = inputs["tokens"].shape[1] if "Q" in kind_of(bucket).dynamic else bucket.q_len
    return replace(bucket, batch=len(inputs["request_slots"]), q_len=width)


def long_enough(step: Bucket, inputs: Inputs, limits: Limits, *, logprobs: bool) -> Inputs:
    """The inputs of a step of these sizes, which are values, with as many tokens a row as its executable takes at least."""
    if step.q_len >= (least := kind_of(step).least):
        return inputs
    return resized(inputs, range(step.batch), StepInputs(replace(step, q_len=least), limits, logprobs))


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
