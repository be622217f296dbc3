"""The time of one step on one NPU: in total, by cause, by kind of layer and by type of operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....graphs.types import Mesh
from ...platform import Platform
from ..acl_graph.file import AclFile
from ..ge_file import GeFile, parse
from ..ge_types import tensor_types
from ..launches import body_of, kind_of, launches
from ..operators.table import IN_PLACE, VIEWS
from ..operators.tensor_type import TensorType
from ..operators.work import Facts, Rows
from . import captured
from .experts import routed_rows
from .parameters import Parameters
from .schedule import Task, schedule, total
from .timing import CAUSES, Topology, duration
from .work import works_of

_STREAM = "_user_stream_label"
_MS = 1e3
_GROUPS = ("group_list", "group_index")
"""Inputs with the number of rows of each expert."""


@dataclass(frozen=True)
class OperatorCost:
    """All operators of one type in bodies of one kind.

    Attributes:
        launches: number of them.
        parts_ms: exposed time by cause, see `StepCost`.
        hbm_bytes: moved between HBM and cores.
        sent_bytes: received from other ranks.
    """

    kind: str
    type: str
    launches: int
    parts_ms: Mapping[str, float]
    hbm_bytes: float
    sent_bytes: float

    @property
    def total_ms(self) -> float:
        return sum(self.parts_ms.values())


@dataclass(frozen=True)
class StepCost:
    """An estimate, nothing of which was measured here.

    Attributes:
        step_ms: of one step on the busiest rank.
        floor_ms: HBM bytes at the nameplate rate alone: weights, states and keys read once.
        parts_ms: `step_ms` by cause; what one operator hides behind another counts for the one that runs.
        operators: by kind of body and type of operator, in order of appearance.
        launches: kernels a step starts.
        bodies: how many bodies of each kind the graph has.
        hbm_bytes, sent_bytes: moved by a step.
        context: cached tokens of each request that were assumed.
        chip: whose speeds were used.
    """

    step_ms: float
    floor_ms: float
    parts_ms: Mapping[str, float]
    operators: tuple[OperatorCost, ...]
    launches: int
    bodies: Mapping[str, int]
    hbm_bytes: float
    sent_bytes: float
    context: int
    chip: str

    @property
    def kinds(self) -> dict[str, list[OperatorCost]]:
        """Operators by kind of body."""
        kinds: dict[str, list[OperatorCost]] = {}
        for cost in self.operators:
            kinds.setdefault(cost.kind, []).append(cost)
        return kinds

    def as_dict(self) -> dict[str, Any]:
        """Plain values, marked as an estimate."""
        kinds = {
            kind: {
                "bodies": self.bodies[kind],
                "launches": sum(cost.launches for cost in costs),
                "parts_ms": {cause: sum(cost.parts_ms.get(cause, 0.0) for cost in costs) for cause in CAUSES},
                "operators": {
                    cost.type: {
                        "launches": cost.launches,
                        "parts_ms": {cause: ms for cause, ms in cost.parts_ms.items() if ms},
                        "hbm_bytes": round(cost.hbm_bytes),
                        "sent_bytes": round(cost.sent_bytes),
                    }
                    for cost in costs
                },
            }
            for kind, costs in self.kinds.items()
        }
        return {
            "estimate": True,
            "chip": self.chip,
            "context": self.context,
            "step_ms": self.step_ms,
            "floor_ms": self.floor_ms,
            "launches": self.launches,
            "hbm_bytes": round(self.hbm_bytes),
            "sent_bytes": round(self.sent_bytes),
            "parts_ms": dict(self.parts_ms),
            "kinds": kinds,
        }


def estimate(ge_file: GeFile, speeds: Parameters, mesh: Mesh, context: int) -> StepCost:
    """The cost of one step.

    Args:
        ge_file: of all ranks.
        speeds: of the chip.
        mesh: the ranks.
        context: cached tokens of each request; attention reads so many, or as many as its page table holds.

    Raises:
        LoweringError: the type of a tensor cannot be told, or an operator communicates over a group that the mesh does not have.
    """
    topology = Topology.of(mesh, speeds.npus_per_node)
    graph = parse(ge_file.graph).graph[0]
    types = tensor_types(ge_file)
    facts = _facts(graph, ge_file, types, speeds, topology, context)
    started = launches(graph)
    waits = _waits(graph, {op.name: i for i, op in enumerate(started)})
    streams = [op.attr[_STREAM].s.decode() if _STREAM in op.attr else "" for op in started]
    return _step(started, facts, speeds, topology, [waits[op.name] for op in started], streams)


def estimate_captured(acl_file: AclFile, speeds: Parameters, mesh: Mesh, context: int, platform: Platform) -> StepCost:
    """The cost of one step of a graph of torch operators, which run one after the other.

    Of a graph whose operators are launched one by one it is the device's time: the host may take longer to launch them.

    Args:
        acl_file: of all ranks.
        speeds, mesh, context: as of `estimate`.
        platform: that the graph was lowered for.

    Raises:
        LoweringError: an operator is not known, or communicates over a group that the mesh does not have.
    """
    topology = Topology.of(mesh, speeds.npus_per_node)
    graph = captured.read(acl_file, platform)
    rows = _routed(graph.operators, graph.types, topology)
    facts = Facts(
        graph.types, graph.resident, graph.pools, context, topology.groups, speeds.cache_bytes, speeds.expert_skew,
        speeds.expert_imbalance, rows,
    )  # fmt: skip
    return _step(graph.operators, facts, speeds, topology, [()] * len(graph.operators), [""] * len(graph.operators))


def _step(
    started: Sequence[Any],
    facts: Facts,
    speeds: Parameters,
    topology: Topology,
    waits: Sequence[tuple[int, ...]],
    streams: Sequence[str],
) -> StepCost:
    """The cost of launches, each with the positions of those that it waits for and the label of its stream."""
    works = [works_of(op, facts) for op in started]
    firsts = list(itertools.accumulate((len(each) for each in works), initial=0))
    tasks = []
    for number, each in enumerate(works):
        # The stages of an operator run one after the other; who waits for it waits for the last.
        after = tuple(firsts[i + 1] - 1 for i in waits[number])
        for stage, work in enumerate(each):
            follows = (firsts[number] + stage - 1,) if stage else after
            tasks.append(Task(duration(work, speeds, topology), follows, streams[number]))
    timeline = schedule(tasks)
    exposed = tuple(_summed(timeline.exposed[begin:end]) for begin, end in itertools.pairwise(firsts))
    moved = [sum(work.hbm_bytes + work.streamed_bytes for work in each) for each in works]
    sent = [sum(work.sent_bytes for work in each) for each in works]
    parts = total(timeline.exposed)
    parts["waiting"] = timeline.waiting_s
    return StepCost(
        step_ms=timeline.step_s * _MS,
        floor_ms=sum(moved) / speeds.hbm_bytes_per_s * _MS,
        parts_ms={cause: seconds * _MS for cause, seconds in parts.items()},
        operators=_grouped(started, moved, sent, exposed),
        launches=len(started),
        bodies=_bodies(started),
        hbm_bytes=sum(moved),
        sent_bytes=sum(sent),
        context=facts.context,
        chip=speeds.chip,
    )


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    return sums


def _facts(graph: Any, ge_file: GeFile, types: Mapping[str, TensorType], speeds: Parameters, topology: Topology, context: int) -> Facts:
    written = {*ge_file.bound, *(operand for _, operand in ge_file.donations)}
    data = ge_file.data
    resident, pools = set(), set()
    for op in graph.op:
        if op.type == "Data":
            resident.add(f"{op.name}:0")
            if data[op.attr["index"].i] in written:
                pools.add(f"{op.name}:0")
        elif op.type in VIEWS:
            for group in (resident, pools):
                if op.input[0] in group:
                    group.add(f"{op.name}:0")
        for port, position in IN_PLACE.get(op.type, {}).items():
            if position < len(op.input) and op.input[position] in pools:
                resident.add(f"{op.name}:{port}")
                pools.add(f"{op.name}:{port}")
    rows = _routed(graph.op, types, topology)
    return Facts(
        types, frozenset(resident), frozenset(pools), context, topology.groups, speeds.cache_bytes, speeds.expert_skew,
        speeds.expert_imbalance, rows,
    )  # fmt: skip


def _routed(operators: Iterable[Any], types: Mapping[str, TensorType], topology: Topology) -> dict[str, Rows]:
    """The rows behind each list of group sizes that an operator reads."""
    ops, rows = {op.name: op for op in operators}, dict[str, Rows]()
    for op in ops.values():
        for tensor, desc in zip(op.input, op.input_desc, strict=False):
            if desc.name in _GROUPS and tensor and tensor not in rows:
                found = routed_rows(ops, types, tensor, topology.groups.get("world", 1))
                if found is not None:
                    rows[tensor] = found
    return rows


def _waits(graph: Any, number: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each launch the launches that it reads or is told to wait for, through views and what is computed at compile time."""
    sources: dict[str, tuple[int, ...]] = {}
    waits: dict[str, tuple[int, ...]] = {}
    for op in graph.op:
        before: set[int] = set()
        for tensor in op.input:
            before.update(sources.get(tensor.rpartition(":")[0], ()))
        if op.name in number:
            waits[op.name] = tuple(before)
            sources[op.name] = (number[op.name],)
        elif before:
            sources[op.name] = tuple(before)
    return waits


def _grouped(
    started: Sequence[Any], moved: Sequence[float], sent: Sequence[float], exposed: tuple[dict[str, float], ...]
) -> tuple[OperatorCost, ...]:
    groups: dict[tuple[str, str], list[int]] = {}
    for i, op in enumerate(started):
        groups.setdefault((kind_of(body_of(op.name)), op.type), []).append(i)
    return tuple(
        OperatorCost(
            kind,
            op_type,
            len(members),
            {cause: seconds * _MS for cause, seconds in total([exposed[i] for i in members]).items()},
            sum(moved[i] for i in members),
            sum(sent[i] for i in members),
        )
        for (kind, op_type), members in groups.items()
    )


def _bodies(started: Sequence[Any]) -> dict[str, int]:
    bodies: dict[str, None] = dict.fromkeys(body_of(op.name) for op in started)
    counts: dict[str, int] = {}
    for body in bodies:
        counts[kind_of(body)] = counts.get(kind_of(body), 0) + 1
    return counts
