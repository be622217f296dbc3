"""Runs every pass in order on a partitioned graph and checks every invariant after each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from ..errors import InvariantError
from ..invariants import check
from ..ir.flatten import bodies
from ..spmd.partition import PartitionedProgram
from . import PASSES, Pass


def optimise(partitioned: PartitionedProgram, passes: Sequence[Pass] = PASSES) -> PartitionedProgram:
    """Runs the passes on a copy.

    Raises:
        InvariantError: naming the pass after which the graph is not legal.
    """
    check(partitioned.graph, partitioned.signature, "partition")
    graph = copy.deepcopy(partitioned.graph)
    parts = [graph, *bodies(graph).values()]
    for step in passes:
        for part in parts:
            step.run(part)
            try:
                part.graph.lint()
            except RuntimeError as error:
                raise InvariantError(f"after pass {step.name!r} the graph is not well formed: {error}") from error
        check(graph, partitioned.signature, f"pass {step.name!r}")
    for part in parts:
        part.recompile()
    return replace(partitioned, graph=graph)
