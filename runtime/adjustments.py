"""Adjustments of a step's logits: biases and penalties of its rows, for each token that they sample (graphs/ops/adjust_logits.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import SpecError
from ..graphs.types import WORD_BITS

if TYPE_CHECKING:
    from .request import Sampling
    from .scheduler.scheduled_step import ScheduledRequest, ScheduledStep

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]

CACHED_BIASES = 16
"""Biases that are kept in the form in which steps take them, which has a number for every token."""


class Adjustment(NamedTuple):
    """How one row's logits are adjusted. What differs between its positions is what the drafts before them change.

    Attributes:
        bias: [V], added first; None adds nothing.
        penalty: [V], added last, at the first position; None adds nothing.
        changes: of each further position the tokens with another penalty.
        seen: [words], a bit a token of prompt and output at the first position; None is none.
        more_seen: of each further position the tokens that are there too.
        repetition_penalty: of the tokens seen.
    """

    bias: Floats | None = None
    penalty: Floats | None = None
    changes: tuple[Mapping[int, float], ...] = ()
    seen: Words | None = None
    more_seen: tuple[tuple[int, ...], ...] = ()
    repetition_penalty: float = 1.0


class Adjuster:
    """Finds the adjustments of steps; keeps what it counted of each request's tokens, which takes memory for every token there is.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._histories: dict[str, _History] = {}

    def adjustments(self, step: ScheduledStep) -> dict[str, Adjustment]:
        """The adjustments of the rows of a step that have any, by request id; to be used before the next call."""
        rows = (row for row in step.rows_with_rules if row.request.sampling.adjusts and row.samples)
        return {row.request.id: self._adjustment(row) for row in rows}

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._histories.pop(request_id, None)

    def _adjustment(self, row: ScheduledRequest) -> Adjustment:
        sampling, state = row.request.sampling, row.state
        bias = bias_of(sampling.logit_bias, self._vocab_size) if sampling.logit_bias else None
        if not sampling.penalises:
            return Adjustment(bias)
        history = self._histories.get(row.request.id)
        if history is None:
            history = self._histories[row.request.id] = _History(sampling, row.request.prompt, self._vocab_size)
        history.extend(state.output_token_ids)
        drafts = tuple(state.drafts[: row.num_drafts])
        # Drafts in the places of the prompt's tokens are no output.
        scored = len(row.forced)
        before = [drafts[scored:place] for place in range(1, len(drafts) + 1)]
        changes = tuple(history.changed(tokens) for tokens in before) if sampling.penalises_output else ()
        return Adjustment(
            bias,
            history.penalty if sampling.penalises_output else None,
            changes,
            history.seen if sampling.repetition_penalty != 1 else None,
            tuple(before),
            sampling.repetition_penalty,
        )


class _History:
    """The tokens of one request: how often its output has each, and which there are in prompt and output."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        self._sampling, self._length = sampling, 0
        self._counts: Counter[int] = Counter()
        self.penalty = np.zeros(vocab_size, np.float32)
        self.seen = np.zeros(-(-vocab_size // WORD_BITS), np.int32)
        _set(self.seen, prompt)

    def extend(self, output: Sequence[int]) -> None:
        """The output, which is what it was plus new tokens."""
        new = output[self._length : len(output)]
        self._length = len(output)
        for token, value in self.changed(new).items():
            self.penalty[token] = value
        self._counts.update(new)
        _set(self.seen, new)

    def changed(self, tokens: Sequence[int]) -> dict[int, float]:
        """The penalties of these tokens once they are there too."""
        sampling = self._sampling
        return {
            token: -(sampling.frequency_penalty * (self._counts[token] + more) + sampling.presence_penalty)
            for token, more in Counter(tokens).items()
        }


def fill(arrays: Mapping[str, npt.NDArray[Any]], rows: Sequence[tuple[int, Adjustment]]) -> None:
    """Stores the adjustments of rows in the inputs of a step, in the order of the rows.

    Args:
        arrays: inputs by name, as for padding.
        rows: number of the row, and what it has.

    Raises:
        SpecError: they are more than the step takes.
    """
    tables, sets = 0, 0
    most = len(arrays.get("adjustments", ()))
    for row, adjustment in rows:
        tables_needed = sum(table is not None for table in (adjustment.bias, adjustment.penalty))
        if tables + tables_needed > most or (adjustment.seen is not None and sets == most):
            raise SpecError(f"{len(rows)} rows with adjustments of their logits, some with two; the step takes {most}")
        if adjustment.bias is not None:
            arrays["adjustments"][tables] = adjustment.bias
            tables += 1
            arrays["bias_rows"][row] = tables
        if adjustment.penalty is not None:
            table = arrays["adjustments"][tables]
            table[:] = adjustment.penalty
            for place, changes in enumerate(adjustment.changes, start=1):
                table[place, list(changes)] = list(changes.values())
            tables += 1
            arrays["penalty_rows"][row] = tables
        if adjustment.seen is not None:
            words = arrays["seen"][sets]
            words[:] = adjustment.seen
            for place, tokens in enumerate(adjustment.more_seen, start=1):
                _set(words[place], tokens)
            sets += 1
            arrays["seen_rows"][row] = sets
            arrays["repetition_penalty"][row] = adjustment.repetition_penalty


@lru_cache(CACHED_BIASES)
def bias_of(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> Floats:
    """A bias for every token: [V]."""
    bias = np.zeros(vocab_size, np.float32)
    for token, value in logit_bias:
        bias[token] = value
    return bias


def _set(words: Words, tokens: Sequence[int]) -> None:
    """Sets the bits of tokens: [words]."""
    ids = np.asarray(tokens, np.int64)
    np.bitwise_or.at(words, ids // WORD_BITS, np.left_shift(np.uint32(1), (ids % WORD_BITS).astype(np.uint32)).view(np.int32))
