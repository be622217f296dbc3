"""What a request's output may be, token by token: a grammar, seen as bitmasks over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..graphs.errors import NpucompileError
from ..graphs.step_inputs import write_width
from ..graphs.types import WORD_BITS

if TYPE_CHECKING:
    from .scheduler.schedule import ScheduledRequest, ScheduledStep

__all__ = ["EVERYTHING", "WORD_BITS", "Bitmask", "Constraint", "ConstraintError", "bitmasks"]

Bitmask = npt.NDArray[np.int32]
"""[W, words]: a bit a token, the lowest bit first, for each token that a row samples (graphs/ops/mask_logits.py)."""

EVERYTHING = -1
"""A word with all bits set."""


class ConstraintError(NpucompileError):
    """Raised when a request's output cannot go on under its constraint; it ends that request alone.

    Args:
        request_id: of the request.
    """

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


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


def bitmasks(step: ScheduledStep, words: int) -> dict[str, Bitmask]:
    """The bitmasks of the rows of a step that sample under a constraint, by request id.

    Raises:
        ConstraintError: of the first request whose output cannot go on.
    """
    width = write_width(step.bucket)
    rows = (row for part in step.groups for row in part.rows if row.request.constraint is not None and row.samples)
    return {row.request.id: _bitmask(row, row.request.constraint, (width, words)) for row in rows if row.request.constraint is not None}


def _bitmask(row: ScheduledRequest, constraint: Constraint, shape: tuple[int, int]) -> Bitmask:
    bitmask = np.full(shape, EVERYTHING, np.int32)
    drafts = row.state.drafts[: row.num_drafts]
    try:
        constraint.fill(row.state.output_token_ids, drafts, bitmask)
    except ValueError as error:
        raise ConstraintError(f"the output cannot go on under its constraint: {error}", row.request.id) from error
    if not bitmask[0].any():
        raise ConstraintError("the output cannot go on under its constraint: it allows no token", row.request.id)
    return bitmask
