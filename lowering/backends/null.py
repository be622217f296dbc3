"""Turns a partitioned graph into its legality, cost and memory, and nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..backend import Backend
from ..lower import Lowered

if TYPE_CHECKING:
    from ...graphs.partition import Partitioned


def lower(partitioned: Partitioned) -> Lowered:
    """The partitioned graph as it is: primitives stay whole, state stays functional."""
    return Lowered(partitioned.program.bucket, "null", partitioned.graph, partitioned.signature)


def _options(threads: int) -> Mapping[str, Any]:
    return {}


def _check_target() -> None:
    """Needs no device and no compiler."""


BACKEND = Backend("null", "none", lower, _options, _check_target, None, None)
