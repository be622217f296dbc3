"""The backend that compiles and runs nothing: it reports legality, cost and memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..backend import Backend
from ..lower import LoweredProgram
from ..platform import CPU, Platform

if TYPE_CHECKING:
    from ...graphs.spmd.partition import PartitionedProgram


class Null(Backend):
    """Needs no device and no compiler."""

    name = "null"
    suffix = None

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        """The partitioned graph as it is: primitives stay whole, state stays functional."""
        return LoweredProgram(partitioned.program.bucket, self.name, partitioned.graph, partitioned.signature)

    def runs_here(self) -> str | None:
        """It runs nowhere."""
        return "backend null has no executables: it reports cost and memory only"


BACKEND = Null()
