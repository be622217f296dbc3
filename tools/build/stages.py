"""One bucket through the stages of the pipeline: traced, partitioned, optimised, lowered."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ...graphs import cost
from ...graphs.ir.trace import Traced, trace
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import Partitioned, partition
from ...graphs.text import as_text
from ...graphs.types import Bucket
from ...lowering.backend import backend
from ...lowering.lower import Lowered
from ...models import step
from .plan import Plan

STAGES = ("traced", "partitioned", "lowered")


@dataclass(frozen=True)
class Staged:
    """One bucket, ready to compile.

    Attributes:
        traced: None on a mesh of several devices, where no device's graph is traced before it is partitioned.
        partitioned: after all passes.
        lowered: for the plan's backend.
    """

    bucket: Bucket
    traced: Traced | None
    partitioned: Partitioned
    lowered: Lowered

    @property
    def texts(self) -> dict[str, str]:
        """Stage name to stable text."""
        name, mesh = self.bucket.name, self.partitioned.mesh
        texts = {
            "partitioned": as_text(self.partitioned.graph, f"{name} partitioned over mesh {mesh}"),
            "lowered": self.lowered.as_text(),
        }
        if self.traced:
            texts["traced"] = as_text(self.traced.graph, f"{name} traced")
        return texts

    def cost(self) -> dict[str, int]:
        """flops, read_bytes and write_bytes of one step of one device."""
        total = cost.cost(self.partitioned.graph)
        return {"flops": total.flops, "read_bytes": total.read_bytes, "write_bytes": total.write_bytes}

    def memory(self) -> dict[str, int]:
        """params_bytes, state_bytes, inputs_bytes and peak_bytes of one device."""
        need = cost.memory(self.partitioned.graph, self.partitioned.signature)
        return {name: getattr(need, name) for name in ("params_bytes", "state_bytes", "inputs_bytes", "peak_bytes")}


def partition_bucket(plan: Plan, bucket: Bucket) -> tuple[Traced | None, Partitioned]:
    """A bucket's traced graph, where one device runs it, and its partitioned one after all passes.

    Raises:
        GraphError: naming the stage or pass that cannot go on.
    """
    # No device ever holds the logits of the whole vocabulary; here they are what executables are compared by.
    program = step.program(plan.model, bucket, plan.limits, plan.dtype, emit_logits=plan.target.local, max_logprobs=plan.max_logprobs)
    traced = trace(program) if plan.mesh.size == 1 else None
    return traced, optimise(partition(traced or program, plan.mesh, plan.rules(bucket)))


def peak_bytes(partitioned: Partitioned) -> int:
    """Largest sum of live intermediate values of a step of one device."""
    return cost.memory(partitioned.graph, partitioned.signature).peak_bytes


def stage(plan: Plan, bucket: Bucket) -> Staged:
    """Takes a bucket from its program to its lowered graph; nothing is allocated.

    Raises:
        GraphError: naming the stage or pass that cannot go on.
    """
    traced, partitioned = partition_bucket(plan, bucket)
    return Staged(bucket, traced, partitioned, backend(plan.backend).lower(partitioned))


def pack_texts(texts: Mapping[str, str]) -> bytes:
    """Texts by stage name, compressed; `unpack_texts` reads them."""
    return zlib.compress(json.dumps(texts, sort_keys=True).encode(), 6)


def unpack_texts(data: bytes) -> dict[str, str]:
    """What `pack_texts` packed."""
    texts: dict[str, str] = json.loads(zlib.decompress(data))
    return texts
