"""Passes over partitioned graphs, in one ordered list."""

from .base import Pass
from .drop_dead import PASS as DROP_DEAD
from .drop_noops import PASS as DROP_NOOPS
from .drop_unread import PASS as DROP_UNREAD
from .merge_equal import PASS as MERGE_EQUAL

PASSES: tuple[Pass, ...] = (DROP_UNREAD, DROP_NOOPS, MERGE_EQUAL, DROP_DEAD)
"""Run in this order on every partitioned graph; the invariants of `graphs.invariants` are checked after each."""

__all__ = ["PASSES", "Pass"]
