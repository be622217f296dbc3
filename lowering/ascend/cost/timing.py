"""How long one operator's work takes, and what it waits for: memory, the matrix unit, the vector unit or other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ....graphs.types import DISPATCH, FUSED_EXPERTS, WORLD, Mesh
from ..operators.work import Work
from .parameters import Parameters

CAUSES = ("launch", "memory", "matrix", "vector", "collectives", "waiting")
"""What time is spent on. "waiting" is time in which no stream has anything to run; no operator of its own has it."""


@dataclass(frozen=True)
class Topology:
    """Groups of ranks.

    Attributes:
        groups: ranks of each group, by its symbol.
        across: groups that have ranks on several nodes.
    """

    groups: Mapping[str, int]
    across: frozenset[str]

    @staticmethod
    def of(mesh: Mesh, npus_per_node: int) -> Topology:
        """The groups of a mesh whose ranks fill nodes in order."""
        groups = dict(mesh.groups())
        groups[DISPATCH] = groups[FUSED_EXPERTS] = groups[WORLD]
        across = {name for name, sets in groups.items() if any(len({rank // npus_per_node for rank in ranks}) > 1 for ranks in sets)}
        return Topology({name: len(sets[0]) for name, sets in groups.items()}, frozenset(across))


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of one operator.

    Attributes:
        launch_s: from the end of the one before it, without what it works: its start, and what any kernel of its kind takes.
        busy_s: what it works.
        cause: what bounds `busy_s`, one of `CAUSES`.
        on_cores: whether it takes the cores, which messages do not, nor what fetches into the cache.
    """

    launch_s: float
    busy_s: float
    cause: str
    on_cores: bool = True

    @property
    def total_s(self) -> float:
        return self.launch_s + self.busy_s


def duration(work: Work, speeds: Parameters, topology: Topology) -> Duration:
    """Time of one operator that has the NPU for itself.

    Memory, matrix unit and vector unit work at the same time, so the slowest of them decides. A collective's fixed cost has its launch.
    """
    if work.group:
        return Duration(
            0.0, _exchange(work, speeds, topology) if work.exchange else _collective(work, speeds, topology), "collectives", False
        )
    if work.fetched_bytes:
        return Duration(0.0, work.fetched_bytes / (speeds.hbm_bytes_per_s * speeds.memory_fraction), "memory", False)
    on_cubes = bool(work.matrix or work.streamed_bytes)
    memory = (
        work.hbm_bytes / (speeds.hbm_bytes_per_s * speeds.memory_fraction)
        + work.cache_bytes / (speeds.cache_bytes_per_s * (1.0 if on_cubes else speeds.vector_cache_fraction))
        + _streamed(work, speeds)
    )
    matrix = (
        work.bf16_ops / (speeds.bf16_ops_per_s * speeds.bf16_fraction)
        + work.int8_ops / (speeds.int8_ops_per_s * speeds.int8_fraction)
        + work.attention_ops / (speeds.bf16_ops_per_s * speeds.attention_fraction)
    )
    vector = work.vector_ops / (speeds.vector_ops_per_s * speeds.vector_fraction)
    busy, cause = max((memory, "memory"), (matrix, "matrix"), (vector, "vector"))
    launch = speeds.matrix_launch_s if on_cubes else speeds.vector_launch_s
    if work.time.fixed_s is not None:
        launch = speeds.launch_gap_s + work.time.fixed_s
    return Duration(launch, busy * work.time.slowdown, cause)


def _streamed(work: Work, speeds: Parameters) -> float:
    shared = work.streamed_bytes / (speeds.hbm_bytes_per_s * speeds.stream_fraction)
    if not work.tasks:
        return shared
    return max(shared, math.ceil(work.tasks / speeds.cores) * work.streamed_bytes / work.tasks / speeds.core_bytes_per_s)


def _collective(work: Work, speeds: Parameters, topology: Topology) -> float:
    ranks, across = topology.groups[work.group], work.group in topology.across
    if ranks == 1:
        return speeds.vector_launch_s
    link = (speeds.node_link_bytes_per_s if across else speeds.link_bytes_per_s) * speeds.link_fraction
    fixed = speeds.collective_latency_s + speeds.collective_hop_s * math.log2(ranks) + (speeds.node_latency_s if across else 0.0)
    return work.steps * fixed + work.sent_bytes / link


def _exchange(work: Work, speeds: Parameters, topology: Topology) -> float:
    ranks, across = topology.groups[work.group], work.group in topology.across
    rate = speeds.dispatch_bytes_per_s if work.exchange == "dispatch" else speeds.combine_bytes_per_s
    if across:
        rate = min(rate, speeds.node_link_bytes_per_s * speeds.link_fraction)
    fixed = speeds.exchange_latency_s + speeds.exchange_hop_s * max(0.0, math.log2(max(ranks, 1) / 8))
    return fixed + (speeds.node_latency_s if across else 0.0) + work.sent_bytes / rate
