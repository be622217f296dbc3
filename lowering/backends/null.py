"""Turns a partitioned graph into its legality, cost and memory, and nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..backend import Backend
from ..lower import Lowered

if TYPE_CHECKING:
    from ...graphs.spmd.partition import Partitioned


def lower(partitioned: Partitioned) -> Lowered:
    """The partitioned graph as it is: primitives stay whole, state stays functional."""
    return Lowered(partitioned.program.bucket, "null", partitioned.graph, partitioned.signature)


def _options(threads: int) -> Mapping[str, Any]:
    return {}


def _check_target() -> None:
    """Needs no device and no compiler."""


def _cpu_features() -> tuple[str, ...]:
    return ()


BACKEND = Backend(
    name="null",
    suffix="none",
    lower=lower,
    options=_options,
    cpu_features=_cpu_features,
    check_target=_check_target,
    compile=None,
    load=None,
)
