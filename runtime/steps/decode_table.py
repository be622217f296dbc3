"""What decode steps read of running requests, as arrays by request slot: written where a request begins or gets a page, and read by all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Limits
from ..request import Request
from ..rng import mixed, random_numbers
from .pack import Arrays, Tables, pack, pack_columns

_FILTERS = ("temperature", "top_k", "top_p", "min_p")


class DecodeTable:
    """The pages, state slots and sampling parameters of the requests of one dp group.

    Args:
        limits: of its pools.
        max_logprobs: as for `pack`.
    """

    def __init__(self, limits: Limits, max_logprobs: int = 0) -> None:
        self._limits, self._max_logprobs, count = limits, max_logprobs, limits.num_request_slots
        self._num_pages = np.zeros(count, np.int64)
        self._pages = np.zeros((count, limits.pages_per_request), np.int32)
        self._columns: Arrays = {name: np.zeros(count, np.int32 if name == "top_k" else np.float32) for name in _FILTERS}
        self._columns |= {"logprobs": np.zeros(count, np.int32), "state_slots_out": np.zeros((count, limits.slots_per_request), np.int32)}
        self._seeds, self._prompts = np.zeros(count, np.uint64), np.zeros(count, np.int64)

    def begin(self, slot: int, request: Request, state_slots: Sequence[int], pages: Sequence[int]) -> None:
        """A request gets a request slot, with these state slots, and the pages that it has already."""
        self._pages[slot] = 0
        self.add(slot, 0, pages)
        columns = self._columns
        columns["state_slots_out"][slot], columns["logprobs"][slot] = state_slots, request.logprobs is not None
        for name, value in zip(_FILTERS, request.sampling.filters, strict=True):
            columns[name][slot] = value
        self._seeds[slot], self._prompts[slot] = mixed(request.sampling.seed or 0), len(request.prompt)

    def add(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """The request of a slot has these pages behind so many that it had."""
        count = first + len(pages)
        if count > self._limits.pages_per_request:
            raise SpecError(f"{count} pages for one row; the page table holds {self._limits.pages_per_request}")
        self._num_pages[slot] = count
        self._pages[slot, first:count] = pages

    def replace(self, slot: int, place: int, page: int) -> None:
        """The request of a slot has another page in this place."""
        self._pages[slot, place] = page

    def inputs(self, bucket: Bucket, slots: Sequence[int], base: Sequence[int], drafts: Sequence[int], tables: Tables) -> Arrays:
        """The packed inputs of a decode step, as of `DecodeRow`s with these attributes (`rows.py`).

        Args:
            slots: request slots of the rows.
            tables: as of `pack_columns`.

        Raises:
            SpecError: when the rows do not fit the bucket, or have too few pages.
        """
        limits = self._limits
        if not slots:
            return pack(bucket, (), limits, max_logprobs=self._max_logprobs)
        rows, start = np.asarray(slots, np.intp), np.asarray(base, np.int64)
        held = self._num_pages[rows]
        # From up to k tokens behind base on the step writes Q candidates, and the draft head the drafts after the last of them.
        ends = np.minimum(start + limits.drafts + bucket.q_len, limits.max_model_len)
        if (short := ends > held * limits.page_size).any():
            row = int(short.argmax())
            pages = f"{held[row]} pages of {limits.page_size} tokens"
            raise SpecError(f"a row ends at position {ends[row]}; its {pages} end before")
        columns = {name: column[rows] for name, column in self._columns.items()}
        columns |= {"request_slots": rows, "base": start, "drafts": np.asarray(drafts), "page_table": self._pages[rows, : held.max()]}
        if (drawn := columns["temperature"] != 0).any():
            # Of the tokens that are sampled after positions base, base + 1, ...; greedy rows need none.
            indices = (start + 1 - self._prompts[rows])[:, None] + np.arange(limits.drafts + bucket.q_len)
            columns["uniform"] = np.where(drawn[:, None], random_numbers(self._seeds[rows, None], indices), 0.0)
        return pack_columns(bucket, columns, tables, limits, max_logprobs=self._max_logprobs)
