"""Takes one bucket through the stages of the pipeline: traced, partitioned, optimised, lowered."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ...graphs.ir.trace import TracedProgram, trace
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import PartitionedProgram, partition
from ...graphs.types import Bucket
from ...lowering.backend import backend
from ...lowering.lower import LoweredProgram
from ...models import programs
from .planned import Plan

STAGES = ("traced", "partitioned", "lowered")


@dataclass(frozen=True)
class Staged:
    """One bucket, ready to compile.

    Attributes:
        traced: None on a mesh of several devices, where tracing and partitioning are one stage.
        partitioned: after all passes.
        lowered: for the plan's backend.
    """

    bucket: Bucket
    traced: TracedProgram | None
    partitioned: PartitionedProgram
    lowered: LoweredProgram

    @property
    def texts(self) -> dict[str, str]:
        """Stage name to stable text."""
        texts = {"partitioned": self.partitioned.as_text(), "lowered": self.lowered.as_text()}
        return texts | ({"traced": self.traced.as_text()} if self.traced else {})


def partition_bucket(plan: Plan, bucket: Bucket) -> tuple[TracedProgram | None, PartitionedProgram]:
    """A bucket's traced graph (on a single device only), and its partitioned graph after all passes.

    Raises:
        GraphError: naming the stage or pass that failed.
    """
    # Verification compares logits. Graphs for NPUs do not emit them: no device ever holds the whole vocabulary.
    program = programs.program(plan.model, bucket, plan.limits, plan.dtype, emit_logits=plan.target.local, max_logprobs=plan.max_logprobs)
    traced = trace(program) if plan.mesh.size == 1 else None
    return traced, optimise(partition(traced or program, plan.mesh, plan.rules(bucket)))


def stage(plan: Plan, bucket: Bucket) -> Staged:
    """Takes a bucket from its program to its lowered graph; nothing is allocated.

    Raises:
        GraphError: naming the stage or pass that failed.
    """
    traced, partitioned = partition_bucket(plan, bucket)
    return Staged(bucket, traced, partitioned, backend(plan.backend).lower(partitioned, plan.platform))


def pack_texts(texts: Mapping[str, str]) -> bytes:
    """Compresses texts by stage name; `unpack_texts` reads them."""
    return zlib.compress(json.dumps(texts, sort_keys=True).encode(), 6)


def unpack_texts(data: bytes) -> dict[str, str]:
    """The texts that `pack_texts` compressed."""
    texts: dict[str, str] = json.loads(zlib.decompress(data))
    return texts
