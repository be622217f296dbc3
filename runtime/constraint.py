"""What a request's output may be, token by token: a grammar, seen as bitmasks over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..graphs.errors import NpucompileError
from ..graphs.sizes import WORD_BITS

__all__ = ["DEAD_END", "EVERYTHING", "TOO_COMPLEX", "WORD_BITS", "Bitmask", "Constraint", "ConstraintError", "TooComplex"]

Bitmask = npt.NDArray[np.int32]
"""[W, words]: a bit a token, the lowest bit first, for each token that a row samples (graphs/ops/mask_logits.py)."""

EVERYTHING = -1
"""A word with all bits set."""


DEAD_END, TOO_COMPLEX = "constraint_dead_end", "grammar_too_complex"
"""Codes of requests that end because no token is left to sample, and because their masks take more work than one may ask for."""


class TooComplex(ValueError):
    """Raised by a constraint whose masks take more work than one request may ask for."""


class ConstraintError(NpucompileError):
    """Raised when a request's output cannot go on under its constraint; it ends that request alone.

    Args:
        request_id: of the request.
        code: DEAD_END or TOO_COMPLEX.
    """

    def __init__(self, message: str, request_id: str, code: str = DEAD_END) -> None:
        super().__init__(message)
        self.request_id, self.code = request_id, code


class Constraint(Protocol):
    """The legal outputs of one request. Called by the stepping thread; it may keep what it found for the output so far."""

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        """Writes which tokens may follow an output, and which may follow each of the drafts after it.

        A row after an illegal draft is not read, whatever it holds: that draft is refused.

        Args:
            output: tokens of the request so far, all of them legal.
            drafts: tokens that may come next.
            bitmask: [at least 1 + len(drafts), words], all ones.

        Raises:
            ValueError: no token may follow, or the constraint cannot be followed any more.
        """
        ...
