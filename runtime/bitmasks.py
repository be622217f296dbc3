"""The bitmasks of a step: what constraints and sampling parameters leave of the vocabulary, for each token that a row samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..graphs.errors import RequestError
from ..graphs.steps.table import kind_of
from .constraint import DEAD_END, EVERYTHING, TOO_COMPLEX, WORD_BITS, Bitmask, ConstraintError, TooComplex
from .request import Request
from .scheduler.scheduled_step import ScheduledRequest, ScheduledStep

Words = npt.NDArray[np.int32]

CACHED_SETS = 64
"""Sets of tokens whose bits are kept, for the requests that run."""


def bitmasks(step: ScheduledStep, words: int, take: Callable[[ScheduledRequest], Bitmask]) -> dict[str, Bitmask]:
    """The bitmasks of the rows of a step that may not sample every token, by request id.

    Args:
        take: finds those of requests with constraints.

    Raises:
        ConstraintError: of the first request whose output cannot go on.
    """
    masks = {}
    for row in step.rows_with_rules:
        if row.state.restricted and row.samples:
            mask = take(row) if row.request.constraint is not None else filled(row, words)
            whole = masks[row.request.id] = np.full((kind_of(step.bucket).sampled(step.bucket), words), EVERYTHING, np.int32)
            whole[: len(mask)] = mask[: len(whole)]
    return masks


def filled(row: ScheduledRequest, words: int) -> Bitmask:
    """The bitmask of one row: [one for each token that it can sample, words].

    Raises:
        ConstraintError: its request's output cannot go on.
    """
    bitmask = np.full((1 + row.num_drafts, words), EVERYTHING, np.int32)
    # Drafts in the places of the prompt's tokens are these tokens, or what comes after them is not read.
    forced, drafts = row.forced, row.state.drafts[: row.num_drafts]
    for mask, token in zip(bitmask, forced, strict=False):
        mask[:] = _bits((token,), words)
    if len(forced) <= len(drafts):
        _restrict(row, drafts[len(forced) :], bitmask[len(forced) :])
    return bitmask


def _restrict(row: ScheduledRequest, drafts: Sequence[int], bitmask: Bitmask) -> None:
    """Clears the bits of tokens that the request may not sample: `bitmask[i]` is for the token after its output and the first i drafts."""
    request, output = row.request, row.state.output_token_ids
    try:
        if request.constraint is not None:
            request.constraint.fill(output, drafts, bitmask)
    except ValueError as error:
        code = TOO_COMPLEX if isinstance(error, TooComplex) else DEAD_END
        raise ConstraintError(f"the output cannot go on under its constraint: {error}", request.id, code) from error
    _restrict_constrained(request, output, drafts, max(row.output_index, 0), bitmask)


def check_first(request: Request, vocab_size: int) -> None:
    """Refuses a request with a constraint that can sample no first token; ids beyond the vocabulary are left to `admission.check`.

    Raises:
        RequestError: its constraint and its sampling parameters have no token in common.
    """
    sampling = request.sampling
    ids = (sampling.allowed_token_ids or (), request.stop_token_ids, *sampling.bad_words)
    if request.constraint is None or not all(0 <= token < vocab_size for token in chain.from_iterable(ids)):
        return
    bitmask = np.full((1, -(-vocab_size // WORD_BITS)), EVERYTHING, np.int32)
    request.constraint.fill((), (), bitmask)
    try:
        _restrict_constrained(request, (), (), 0, bitmask)
    except ConstraintError as error:
        raise RequestError(str(error), param=_fields(request)[0], code=error.code) from error


def _restrict_constrained(request: Request, output: Sequence[int], drafts: Sequence[int], count: int, bitmask: Bitmask) -> None:
    """As `forbid`, where the constraint has taken away its own. Where nothing would be left and the output may end, it does.

    Raises:
        ConstraintError: no token is left after the output.
    """
    legal = bitmask.copy() if request.constraint is not None else bitmask
    forbid(request, output, drafts, count, bitmask)
    for place in range(len(drafts) + 1 if legal is not bitmask else 0):
        if not bitmask[place].any() and request.stop_token_ids:
            bitmask[place] = legal[place] & _bits(tuple(sorted(request.stop_token_ids)), bitmask.shape[1])
    if not bitmask[0].any():
        fields = " and ".join(_fields(request))
        why = f"{fields} forbid every token that it allows" if request.constraint and legal[0].any() else "it allows no token"
        raise ConstraintError(f"the output cannot go on under its constraint: {why}", request.id)


def _fields(request: Request) -> list[str]:
    """The sampling parameters that a request forbids tokens with."""
    sampling = request.sampling
    values = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words, "min_tokens": sampling.min_tokens}
    return [name for name, value in values.items() if value]


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
