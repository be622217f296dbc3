"""The bitmasks of a step: what constraints and sampling parameters leave of the vocabulary, for each token that a row samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..graphs.step_inputs import write_width
from .constraint import EVERYTHING, WORD_BITS, Bitmask, ConstraintError
from .request import Request
from .scheduler.scheduled_step import ScheduledRequest, ScheduledStep

Words = npt.NDArray[np.int32]

CACHED_SETS = 64
"""Sets of tokens whose bits are kept, for the requests that run."""


def bitmasks(step: ScheduledStep, words: int) -> dict[str, Bitmask]:
    """The bitmasks of the rows of a step that may not sample every token, by request id.

    Raises:
        ConstraintError: of the first request whose output cannot go on.
    """
    shape = write_width(step.bucket), words
    rows = (row for row in step.rows_with_rules if row.state.restricted and row.samples)
    return {row.request.id: _bitmask(row, shape) for row in rows}


def _bitmask(row: ScheduledRequest, shape: tuple[int, int]) -> Bitmask:
    bitmask = np.full(shape, EVERYTHING, np.int32)
    # Drafts in the places of the prompt's tokens are these tokens, or what comes after them is not read.
    forced, drafts = row.forced, row.state.drafts[: row.num_drafts]
    for words, token in zip(bitmask, forced, strict=False):
        words[:] = _bits((token,), shape[1])
    if len(forced) <= len(drafts):
        _restrict(row, drafts[len(forced) :], bitmask[len(forced) :])
    return bitmask


def _restrict(row: ScheduledRequest, drafts: Sequence[int], bitmask: Bitmask) -> None:
    """Takes away what the request's own rules forbid after its output, and after each of the drafts behind it."""
    request, output = row.request, row.state.output_token_ids
    try:
        if request.constraint is not None:
            request.constraint.fill(output, drafts, bitmask)
    except ValueError as error:
        raise ConstraintError(f"the output cannot go on under its constraint: {error}", request.id) from error
    legal = bool(bitmask[0].any())
    forbid(request, output, drafts, max(row.output_index, 0), bitmask)
    if not bitmask[0].any():
        why = "its sampling parameters forbid every token that it allows" if request.constraint and legal else "it allows no token"
        raise ConstraintError(f"the output cannot go on under its constraint: {why}", request.id)


def forbid(request: Request, output: Sequence[int], drafts: Sequence[int], count: int, bitmask: Bitmask) -> None:
    """Takes away what `min_tokens`, `allowed_token_ids` and `bad_words` forbid after an output, and after each of the drafts behind it.

    Args:
        output: tokens of the request so far; where nothing depends on them (`Request.follows_output`), any part of these.
        drafts: tokens that may come next.
        count: tokens that the output has, at the least.
        bitmask: [at least 1 + len(drafts), words].
    """
    sampling, words = request.sampling, bitmask.shape[1]
    if sampling.allowed_token_ids is not None:
        bitmask &= _bits(sampling.allowed_token_ids, words)
    single = tuple(word[0] for word in sampling.bad_words if len(word) == 1)
    if single:
        bitmask &= ~_bits(single, words)
    several = [word for word in sampling.bad_words if len(word) > 1]
    if not several and not request.cannot_end(count):
        return
    first = max(0, len(output) - max(map(len, several), default=0))
    for place in range(len(drafts) + 1):
        before = (*output[first : len(output)], *drafts[:place])
        _clear(bitmask[place], (word[-1] for word in several if before[1 - len(word) :] == word[:-1]))
        if request.cannot_end(count + place):
            _clear(bitmask[place], request.stop_token_ids)


def _clear(words: Words, tokens: Iterable[int]) -> None:
    """Clears the bits of tokens in one mask, [words]."""
    for token in tokens:
        words[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS).view(np.int32)


@lru_cache(CACHED_SETS)
def _bits(tokens: tuple[int, ...], words: int) -> Words:
    """A mask with the bits of these tokens: [words]."""
    bits = np.zeros(words * WORD_BITS, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
