"""Turns a planned bucket into all its stages: traced, partitioned, optimised, lowered, with what each says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ...graphs.ir.trace import Traced, trace
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import Partitioned, partition
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
        partitioned: after all passes.
        eager: the reference form; None where nothing of the plan runs on this machine.
        target: the form of the plan's backend; None where that is the eager one.
        texts: stage name to stable text; on a mesh of several devices no device's graph is traced before it is partitioned.
        cost: flops, read_bytes, write_bytes of one step.
        memory: params_bytes, state_bytes, inputs_bytes, peak_bytes of one device.
    """

    bucket: Bucket
    partitioned: Partitioned
    eager: Lowered | None
    target: Lowered | None
    texts: dict[str, str]
    cost: dict[str, int]
    memory: dict[str, int]


def partition_bucket(plan: Plan, bucket: Bucket) -> tuple[Traced | None, Partitioned]:
    """A bucket's traced graph, where one device runs it, and its partitioned one after all passes.

    Raises:
        GraphError: naming the stage or pass that cannot go on.
    """
    program = step.program(plan.model, bucket, plan.limits, plan.dtype, emit_logits=not plan.on_device, max_logprobs=plan.max_logprobs)
    traced = trace(program) if plan.mesh.size == 1 else None
    return traced, optimise(partition(traced or program, plan.mesh, plan.rules(bucket)))


def stage(plan: Plan, bucket: Bucket) -> Staged:
    """Takes a bucket from its program to its lowered graphs; nothing is allocated.

    Raises:
        GraphError: naming the stage or pass that cannot go on.
    """
    traced, partitioned = partition_bucket(plan, bucket)
    eager = None if plan.on_device else backend("eager").lower(partitioned)
    target = backend(plan.backend).lower(partitioned) if plan.backend != "eager" else None
    lowered = target or eager
    assert lowered is not None
    cost, memory = partitioned.cost(), partitioned.memory()
    texts = {"partitioned": partitioned.as_text(), "lowered": lowered.as_text()}
    if traced:
        texts["traced"] = traced.as_text()
    return Staged(
        bucket,
        partitioned,
        eager,
        target,
        texts,
        {"flops": cost.flops, "read_bytes": cost.read_bytes, "write_bytes": cost.write_bytes},
        {
            "params_bytes": memory.params_bytes,
            "state_bytes": memory.state_bytes,
            "inputs_bytes": memory.inputs_bytes,
            "peak_bytes": memory.peak_bytes,
        },
    )
