"""Turns rows of live work into the padded arrays of one bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import SpecError
from ..graphs.types import Bucket, Limits
from .request import Sampling

Arrays = dict[str, npt.NDArray[Any]]


class Row(NamedTuple):
    """One request's share of a step, with the pages and slots it uses.

    Attributes:
        tokens: its new tokens, 1 to q_len of them.
        start: position of the first new token = tokens of the request already in the cache.
        pages: ids of its pages, in order of position; they hold start + len(tokens) tokens at least.
        read_slot: state slot to start from.
        write_slots: decode: where the state after each new token goes; prefill: where the state after the last one goes.
        sampling: how its tokens are picked.
        uniforms: random numbers in [0, 1), one for each token that may be sampled; greedy needs none.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    read_slot: int
    write_slots: Sequence[int]
    sampling: Sampling = Sampling()
    uniforms: Sequence[float] = ()


def of_kind(buckets: Iterable[Bucket], kind: str) -> tuple[Bucket, ...]:
    """The buckets of one kind, smallest first.

    Raises:
        SpecError: when there is none.
    """
    found = tuple(sorted(b for b in buckets if b.kind == kind))
    if not found:
        raise SpecError(f"no {kind} bucket among {[b.name for b in buckets]}; serving needs at least one of each kind")
    return found


def choose(buckets: Iterable[Bucket], live: int) -> Bucket:
    """The decode bucket with the smallest batch that holds `live` rows; the largest when none does, and the caller splits.

    Raises:
        SpecError: when there is no decode bucket, or `live` is below 1.
    """
    if live < 1:
        raise SpecError(f"a decode bucket for {live} rows; legal is at least 1")
    decode = of_kind(buckets, "decode")
    return next((b for b in decode if b.batch >= live), decode[-1])


def choose_prefill(buckets: Iterable[Bucket], remaining: int) -> Bucket:
    """The prefill bucket with the smallest q_len that holds `remaining` tokens; the longest when none does.

    Raises:
        SpecError: when there is no prefill bucket, or `remaining` is below 1.
    """
    if remaining < 1:
        raise SpecError(f"a prefill bucket for {remaining} tokens; legal is at least 1")
    prefill = sorted(of_kind(buckets, "prefill"), key=lambda b: (b.q_len, b.batch))
    return next((b for b in prefill if b.q_len >= remaining), prefill[-1])


def write_width(bucket: Bucket) -> int:
    """W: state slots written, and tokens sampled, per row."""
    return bucket.q_len if bucket.kind == "decode" else 1


def padded_rows(bucket: Bucket, live: int) -> int:
    """Rows of padding when `live` rows run in the bucket."""
    return bucket.batch - live


def pack(bucket: Bucket, rows: Sequence[Row], limits: Limits) -> Arrays:
    """The inputs of one step, by name.

    Every array is new, so nothing of an earlier step can be in the padding: padding rows have length 0, the null page,
    the null slot and greedy sampling.

    Returns:
        tokens int32 [B,Q], starts int32 [B], lengths int32 [B], page_table int32 [B,N], read_slots int32 [B],
        write_slots int32 [B,W], temperature f32 [B], top_k int32 [B], top_p f32 [B], min_p f32 [B], uniform f32 [B,W].

    Raises:
        SpecError: when the rows do not fit the bucket or the limits.
    """
    B, Q, N, W = bucket.batch, bucket.q_len, limits.pages_per_request, write_width(bucket)
    if len(rows) > B:
        raise SpecError(f"{len(rows)} rows for {bucket.name}, which holds {B}")
    arrays: Arrays = {
        "tokens": np.zeros((B, Q), np.int32),
        "starts": np.zeros(B, np.int32),
        "lengths": np.zeros(B, np.int32),
        "page_table": np.zeros((B, N), np.int32),
        "read_slots": np.zeros(B, np.int32),
        "write_slots": np.zeros((B, W), np.int32),
        "temperature": np.zeros(B, np.float32),
        "top_k": np.zeros(B, np.int32),
        "top_p": np.ones(B, np.float32),
        "min_p": np.zeros(B, np.float32),
        "uniform": np.zeros((B, W), np.float32),
    }
    for i, row in enumerate(rows):
        _check(bucket, row, limits)
        arrays["tokens"][i, : len(row.tokens)] = row.tokens
        arrays["page_table"][i, : len(row.pages)] = row.pages
        arrays["write_slots"][i, : len(row.write_slots)] = row.write_slots
        arrays["uniform"][i, : len(row.uniforms)] = row.uniforms
    live = slice(0, len(rows))
    arrays["starts"][live] = [row.start for row in rows]
    arrays["lengths"][live] = [len(row.tokens) for row in rows]
    arrays["read_slots"][live] = [row.read_slot for row in rows]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        arrays[name][live] = [getattr(row.sampling, name) for row in rows]
    return arrays


def _check(bucket: Bucket, row: Row, limits: Limits) -> None:
    W = write_width(bucket)
    if not 1 <= len(row.tokens) <= bucket.q_len:
        raise SpecError(f"a row of {len(row.tokens)} tokens for {bucket.name}; legal is 1 to {bucket.q_len}")
    if len(row.write_slots) > W or len(row.uniforms) > W:
        given = f"{len(row.write_slots)} write slots and {len(row.uniforms)} uniforms"
        raise SpecError(f"a row of {given} for {bucket.name}; legal is up to {W} of each")
    if len(row.pages) > limits.pages_per_request:
        raise SpecError(f"{len(row.pages)} pages for one row; the page table holds {limits.pages_per_request}")
    end = row.start + len(row.tokens)
    if end > len(row.pages) * limits.page_size:
        raise SpecError(f"a row ends at position {end}; its {len(row.pages)} pages of {limits.page_size} tokens end before")
