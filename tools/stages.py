"""Turns a planned bucket into all its stages: traced, partitioned, optimised, lowered, with what each says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..graphs import report
from ..graphs.optimise import optimise
from ..graphs.partition import Partitioned, partition
from ..graphs.text import as_text
from ..graphs.trace import trace
from ..graphs.types import Bucket, Mesh, Rules
from ..lowering.backend import backend
from ..lowering.lower import Lowered
from ..models import step
from .plan import Plan

STAGES = ("traced", "partitioned", "lowered")


@dataclass(frozen=True)
class Staged:
    """One bucket, ready to compile.

    Attributes:
        partitioned: after all passes.
        eager: the reference form.
        target: the form of the plan's backend; None where that is the eager one.
        texts: stage name to stable text.
        cost: flops, read_bytes, write_bytes of one step.
        memory: params_bytes, state_bytes, inputs_bytes, peak_bytes of one device.
    """

    bucket: Bucket
    partitioned: Partitioned
    eager: Lowered
    target: Lowered | None
    texts: dict[str, str]
    cost: dict[str, int]
    memory: dict[str, int]


def stage(plan: Plan, bucket: Bucket, mesh: Mesh, rules: Rules) -> Staged:
    """Takes a bucket from its program to its lowered graphs; nothing is allocated.

    Raises:
        GraphError: naming the stage or pass that cannot go on.
    """
    traced = trace(step.program(plan.model, bucket, plan.limits, plan.dtype))
    partitioned = optimise(partition(traced, mesh, rules))
    eager = backend("eager").lower(partitioned)
    target = backend(plan.backend).lower(partitioned) if plan.backend != "eager" else None
    cost, memory = report.cost(partitioned.graph), report.memory(partitioned.graph, partitioned.signature)
    texts = {
        "traced": as_text(traced.graph, f"{bucket.name} traced"),
        "partitioned": as_text(partitioned.graph, f"{bucket.name} partitioned over mesh {mesh}"),
        "lowered": (target or eager).as_text(),
    }
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
