"""Rounds in which all ranks say whether each could do something, over a store that they share."""

from __future__ import annotations

import itertools
import math
import time

from torch._C._distributed_c10d import Store

from ...graphs.errors import LoweringError

PAUSE_S = 0.005


class Agreement:
    """A function that all ranks call as often, in the same order. A rank that is lost ends the others by the control plane.

    Args:
        store: used by nothing else.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._rounds = itertools.count()

    def __call__(self, reason: str, limit_s: float | None = None) -> str:
        """Says why this rank could not, or ""; returns what the first rank that could not said, with its number, or "".

        Raises:
            LoweringError: ranks have said nothing in `limit_s`.
        """
        number = next(self._rounds)
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], f"+{reason}")
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                raise LoweringError(f"ranks {late} have not answered within {limit_s} s{reason and f'; rank {self._rank}: {reason}'}")
            # In Python, where signals are heard.
            time.sleep(PAUSE_S)
        reasons = [text.decode().removeprefix("+") for text in self._store.multi_get(keys)]
        return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
