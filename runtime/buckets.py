"""Choice of the bucket of a decode step, and the padded input arrays of any step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..graphs.errors import SpecError
from ..graphs.step_inputs import OPTIONAL_ROWS, StepInputs
from ..graphs.types import Bucket, Limits
from . import adjustments
from .adjustments import Adjustment
from .constraint import Bitmask
from .picture_spans import Places as Places
from .request import Sampling
from .segments import SegmentRow, SegmentSizes, pack_segments

Arrays = dict[str, npt.NDArray[Any]]

DTYPES = {torch.int32: np.int32, torch.float32: np.float32}


class PrefillRow(NamedTuple):
    """One request's chunk in a prefill step, with the pages and slots that it reads and writes.

    Attributes:
        tokens: the chunk, 1 to q_len tokens.
        start: position of the first of them: how many tokens of the request are in the cache already.
        pages: ids of its pages in order of position, at least enough for start + len(tokens) tokens.
        slot: state slot to write the state after the last token to.
        request_slot: request slot that its first decode step starts from.
        next_token: the prompt's token after the chunk; -1 where that token is sampled.
        sampling: parameters of the sampled token.
        uniform: random number in [0, 1) of the sampled token; greedy sampling needs none.
        logprobs: whether the request asked for log probabilities.
        bitmask: [1, words] of the sampled token; None restricts nothing.
        adjustment: of the logits of the sampled token; None changes nothing.
        start_slot: state slot to start from; None is the one that it writes.
        places: of its tokens, if its prompt has pictures.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int
    request_slot: int
    next_token: int = -1
    sampling: Sampling = Sampling()
    uniform: float = 0.0
    logprobs: bool = False
    bitmask: Bitmask | None = None
    adjustment: Adjustment | None = None
    start_slot: int | None = None
    places: Places | None = None


class DecodeRow(NamedTuple):
    """One request in a decode step, with the pages and slots that it reads and writes; its request slot holds tokens and position.

    Attributes:
        request_slot: request slot that the step starts from.
        base: smallest position at which it can start, for all the host knows.
        pages: ids of its pages in order of position, at least enough for every token that can be written from `base` on.
        slots: all state slots of the request, in the same order at every step.
        drafts: how many of its drafts are verified, 0 to Q-1.
        sampling: parameters of the sampled tokens.
        uniforms: random numbers in [0, 1) of the tokens that can be sampled after positions base, base + 1, ..., k + Q of them or more;
            greedy sampling needs none.
        logprobs: whether the request asked for log probabilities.
        bitmask: [Q, words] of the sampled tokens; None restricts nothing.
        adjustment: of the logits of the sampled tokens; None changes nothing.
    """

    request_slot: int
    base: int
    pages: Sequence[int]
    slots: Sequence[int]
    drafts: int = 0
    sampling: Sampling = Sampling()
    uniforms: Sequence[float] = ()
    logprobs: bool = False
    bitmask: Bitmask | None = None
    adjustment: Adjustment | None = None


Row = PrefillRow | DecodeRow | SegmentRow
R = TypeVar("R", PrefillRow, DecodeRow, SegmentRow)


def of_kind(buckets: Iterable[Bucket], kind: str) -> tuple[Bucket, ...]:
    """The buckets of one kind, smallest first.

    Raises:
        SpecError: when there is none.
    """
    matching = tuple(sorted(b for b in buckets if b.kind == kind))
    if not matching:
        raise SpecError(f"no {kind} bucket among {[b.name for b in buckets]}; serving needs at least one of each kind")
    return matching


def choose(buckets: Iterable[Bucket], live: int) -> Bucket:
    """The decode bucket with the smallest batch that holds `live` rows; the largest when none does, and the caller splits the rows.

    Raises:
        SpecError: when there is no decode bucket, or `live` is below 1.
    """
    if live < 1:
        raise SpecError(f"a decode bucket for {live} rows; legal is at least 1")
    decode = of_kind(buckets, "decode")
    return next((b for b in decode if b.batch >= live), decode[-1])


def padded_rows(bucket: Bucket, live: int) -> int:
    """Rows of padding when `live` rows run in the bucket."""
    return bucket.batch - live


def pack(bucket: Bucket, rows: Sequence[Row], limits: Limits, *, max_logprobs: int = 0, segments: SegmentSizes | None = None) -> Arrays:
    """The inputs of one step (graphs/step_inputs.py, of an encode bucket models/encode_step.py), by name.

    Every array is new, so that nothing of an earlier step can be in the padding.

    Args:
        rows: PrefillRow for a prefill bucket, DecodeRow for a decode bucket, SegmentRow for an encode bucket.
        max_logprobs: for how many of the most likely tokens the graphs return log probabilities; with 0 they return none.
        segments: what encode buckets take.

    Raises:
        SpecError: when the rows do not fit the bucket or the limits.
    """
    if bucket.kind == "encode":
        if segments is None:
            raise SpecError(f"{bucket.name}, and nothing says what its segments are; legal are the sizes of the artifact's")
        return pack_segments(bucket, _all_of(SegmentRow, bucket, rows), segments)
    if len(rows) > bucket.batch:
        raise SpecError(f"{len(rows)} rows for {bucket.name}, which holds {bucket.batch}")
    # New zeros rather than copies of them: memory that no step writes, as of most bitmasks, is never touched.
    arrays: Arrays = {
        name: np.full(shape, padding, dtype) if padding else np.zeros(shape, dtype)
        for name, shape, dtype, padding in _layout(StepInputs(bucket, limits, logprobs=max_logprobs > 0))
    }
    if bucket.kind == "decode":
        decode = _all_of(DecodeRow, bucket, rows)
        _fill_decode(arrays, bucket, decode, limits)
        _fill_shared(arrays, decode, limits)
    else:
        prefill = _all_of(PrefillRow, bucket, rows)
        _fill_prefill(arrays, bucket, prefill, limits)
        _fill_shared(arrays, prefill, limits)
    return arrays


@functools.cache
def _layout(inputs: StepInputs) -> tuple[tuple[str, tuple[int, ...], type, float], ...]:
    """Name, shape, dtype and padding value of each input."""
    return tuple((field.name, shape, DTYPES[field.dtype], field.padding) for field, shape in inputs.shapes())


def _fill_shared(arrays: Arrays, rows: Sequence[PrefillRow | DecodeRow], limits: Limits) -> None:
    live, page_table = slice(0, len(rows)), arrays["page_table"]
    for i, row in enumerate(rows):
        if not 1 <= row.request_slot < limits.num_request_slots:
            raise SpecError(f"a row with request slot {row.request_slot}; legal is 1 to {limits.num_request_slots - 1}")
        if len(row.pages) > limits.pages_per_request:
            raise SpecError(f"{len(row.pages)} pages for one row; the page table holds {limits.pages_per_request}")
        page_table[i, : len(row.pages)] = row.pages
    arrays["request_slots"][live] = [row.request_slot for row in rows]
    filters = zip(*(row.sampling.filters for row in rows), strict=True)
    for name, values in zip(("temperature", "top_k", "top_p", "min_p") if rows else (), filters, strict=True):
        arrays[name][live] = values
    if "logprobs" in arrays:
        arrays["logprobs"][live] = [row.logprobs for row in rows]
    _fill_bitmasks(arrays, [(i, row.bitmask) for i, row in enumerate(rows) if row.bitmask is not None])
    adjustments.fill(arrays, [(i, row.adjustment) for i, row in enumerate(rows) if row.adjustment is not None])


def _fill_bitmasks(arrays: Arrays, masked: Sequence[tuple[int, Bitmask]]) -> None:
    """Stores the bitmasks of rows in the order of the rows."""
    most = len(arrays.get("bitmask", ()))
    if len(masked) > most:
        raise SpecError(f"{len(masked)} rows with bitmasks; the step takes {most}")
    for place, (row, bitmask) in enumerate(masked):
        arrays["bitmask_rows"][row] = place + 1
        arrays["bitmask"][place] = bitmask


def without_unused(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The inputs without the bitmasks and adjustments that no row has, which are long and are not read."""
    used = {name: max(arrays[rows].max() for rows in whose) for name, whose in OPTIONAL_ROWS.items() if name in arrays}
    return {**arrays, **{name: arrays[name][:count] for name, count in used.items()}}


def with_all_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """An input with as many rows as its graph takes; zeros where `without_unused` left them out."""
    if len(array) == rows:
        return array
    whole = np.zeros((rows, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole


def _fill_prefill(arrays: Arrays, bucket: Bucket, rows: Sequence[PrefillRow], limits: Limits) -> None:
    live = slice(0, len(rows))
    for i, row in enumerate(rows):
        if not 1 <= len(row.tokens) <= bucket.q_len:
            raise SpecError(f"a row of {len(row.tokens)} tokens for {bucket.name}; legal is 1 to {bucket.q_len}")
        _check_pages(row.pages, row.start + len(row.tokens), limits)
        arrays["tokens"][i, : len(row.tokens)] = row.tokens
    arrays["num_computed_tokens"][live] = [row.start for row in rows]
    arrays["query_lens"][live] = [len(row.tokens) for row in rows]
    arrays["state_slots_in"][live] = [row.slot if row.start_slot is None else row.start_slot for row in rows]
    arrays["state_slots_out"][live, 0] = [row.slot for row in rows]
    arrays["uniform"][live, 0] = [row.uniform for row in rows]
    if "next_tokens" in arrays:
        arrays["next_tokens"][live] = [row.next_token for row in rows]
    for i, row in enumerate(rows):
        _fill_places(arrays, i, row, limits)


def _fill_places(arrays: Arrays, i: int, row: PrefillRow, limits: Limits) -> None:
    """Positions on three axes and rows of pictures, in graphs that take them; text is at its index on all axes."""
    count, places = len(row.tokens), row.places
    if "positions" in arrays:
        indices = np.arange(row.start, row.start + count, dtype=np.int32)[:, None]
        arrays["positions"][i, :count] = indices if places is None else places.positions
        if places is not None:
            if not 0 <= min(places.picture_rows) <= max(places.picture_rows) < limits.picture_rows:
                used = f"{min(places.picture_rows)} to {max(places.picture_rows)}"
                raise SpecError(f"a row with rows of pictures {used}; legal is 0 to {limits.picture_rows - 1}")
            arrays["picture_rows"][i, : count + 1] = places.picture_rows
    elif places is not None:
        raise SpecError(f"a row with pictures, and the graphs keep {limits.picture_rows} rows of pictures; legal is a row without")


def _fill_decode(arrays: Arrays, bucket: Bucket, rows: Sequence[DecodeRow], limits: Limits) -> None:
    Q, most, live, slots, numbers = bucket.q_len, limits.drafts, slice(0, len(rows)), arrays["state_slots_out"], arrays["uniform"]
    for i, row in enumerate(rows):
        if len(row.slots) != most + 1 or 0 < len(row.uniforms) < most + Q:
            sizes = f"{len(row.slots)} slots and {len(row.uniforms)} uniforms"
            raise SpecError(f"a row of {sizes} for {bucket.name}; legal is {most + 1} slots, and {most + Q} uniforms or none")
        if not 0 <= row.drafts < Q:
            raise SpecError(f"a row of {row.drafts} drafts for {bucket.name}; legal is 0 to {Q - 1}")
        # From up to k tokens behind base on the step writes Q candidates, and the draft head the drafts after the last of them.
        _check_pages(row.pages, min(row.base + most + Q, limits.max_model_len), limits)
        slots[i] = row.slots
        if row.uniforms:
            numbers[i] = row.uniforms[: most + Q]
    arrays["drafts"][live] = [row.drafts for row in rows]
    arrays["base"][live] = [row.base for row in rows]


def _check_pages(pages: Sequence[int], end: int, limits: Limits) -> None:
    if end > len(pages) * limits.page_size:
        raise SpecError(f"a row ends at position {end}; its {len(pages)} pages of {limits.page_size} tokens end before")


def _all_of(kind: type[R], bucket: Bucket, rows: Sequence[Row]) -> list[R]:
    wrong = next((type(row) for row in rows if not isinstance(row, kind)), None)
    if wrong is not None:
        raise SpecError(f"a {wrong.__name__} for {bucket.name}; legal is {kind.__name__}")
    return [row for row in rows if isinstance(row, kind)]
