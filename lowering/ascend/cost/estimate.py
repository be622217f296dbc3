"""The time of one step on one NPU: in total, by cause, by kind of layer and by type of operator."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ...platform import Platform
from ..acl_graph.file import AclFile
from ..ge_file import GeFile
from ..launches import body_of, kind_of
from ..legality.nodes import OPERAND, Nodes, nodes_of
from ..operators.node import Node
from ..operators.table import IN_PLACE, VIEWS
from ..operators.work import Facts, Rows, Work
from .parameters import Parameters
from .schedule import Task, intervals, schedule, total
from .timing import CAUSES, Duration, Topology, duration
from .work import routed_rows, works_of

_MS = 1e3
CONTENTIONS = (1.25, 1.5)
"""What half of the cores cost kernels of decode steps in public measurements: attention 1.28, an MLA prolog 1.5, products 1.25
(cann-recipes, LongCat on Atlas A3). None was published of kernels beside an exchange."""
PREFETCH = "prefetch"
"""What the stream of GE that fetches into the cache is called."""
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
        contended_ms: `step_ms` if kernels took so many times as long while a message travels (`CONTENTIONS`).
        streams: launches and the ms that they take one after the other, by label of their stream; "main" is the graph's own.
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
    contended_ms: Mapping[float, float]
    streams: Mapping[str, Mapping[str, float]]
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
            "contended_ms": {str(factor): ms for factor, ms in self.contended_ms.items()},
            "streams": {label: dict(stream) for label, stream in self.streams.items()},
            "hbm_bytes": round(self.hbm_bytes),
            "sent_bytes": round(self.sent_bytes),
            "parts_ms": dict(self.parts_ms),
            "kinds": kinds,
        }


def estimate(graph: GeFile | AclFile, speeds: Parameters, mesh: Mesh, context: int, platform: Platform) -> StepCost:
    """The cost of one step.

    Of a captured graph whose operators are launched one by one it is the device's time: the host may take longer to launch them.

    Args:
        graph: of all ranks.
        speeds: of the chip.
        mesh: the ranks.
        context: cached tokens of each request; attention reads so many, or as many as its page table holds.
        platform: that the graph was lowered for.

    Raises:
        LoweringError: the type of a tensor cannot be told, an operator is not known, or it communicates over a group that the mesh does
            not have.
    """
    timed = timed_launches(graph, speeds, mesh, context, platform)
    return _step(timed, speeds)


@dataclass(frozen=True)
class Lasting:
    """When a launch of a step runs.

    Attributes:
        body: that it belongs to.
        stream: its label; "" is the graph's own.
        cause: what bounds it, one of `CAUSES`.
    """

    body: str
    type: str
    stream: str
    start_ms: float
    end_ms: float
    cause: str


def timeline(graph: GeFile | AclFile, speeds: Parameters, mesh: Mesh, context: int, platform: Platform) -> tuple[Lasting, ...]:
    """The launches of one step, or their stages, as they begin; arguments and errors as of `estimate`."""
    timed = timed_launches(graph, speeds, mesh, context, platform)
    nodes = [node for node, stages in zip(timed.started, timed.works, strict=True) for _ in stages]
    return tuple(
        Lasting(body_of(nodes[i].name), nodes[i].type, timed.tasks[i].stream, start * _MS, end * _MS, timed.tasks[i].duration.cause)
        for start, end, i in intervals(timed.tasks)
    )


@dataclass(frozen=True)
class Timed:
    """The launches of a step, each with its work.

    Attributes:
        nodes: all operators, in order.
        started: the launches among them.
        works: of each the work of its stages.
        tasks: their stages, one after the other.
        facts: what work was told from.
    """

    nodes: Sequence[Node]
    started: Sequence[Node]
    works: Sequence[Sequence[Work]]
    tasks: Sequence[Task]
    facts: Facts

    @property
    def seconds(self) -> list[float]:
        """How long each launch takes, alone."""
        return [sum(task.duration.total_s for task in self.tasks[begin:end]) for begin, end in itertools.pairwise(self.firsts)]

    @property
    def firsts(self) -> list[int]:
        """Position of each launch's first task, and the number of tasks."""
        return list(itertools.accumulate((len(each) for each in self.works), initial=0))


def timed_launches(graph: GeFile | AclFile, speeds: Parameters, mesh: Mesh, context: int, platform: Platform) -> Timed:
    """The launches of one step; arguments and errors as of `estimate`."""
    read, topology = nodes_of(graph, platform), Topology.of(mesh, speeds.npus_per_node)
    started = read.started
    # A torch operator that the table does not have goes by its own name.
    if unknown := next((node for node in started if "." in node.type), None):
        raise LoweringError(f"{unknown.name} ({unknown.type}): nothing is known of this operator; legal are those of the table of legality")
    waits = _waits(read.nodes, {node.name: i for i, node in enumerate(started)})
    facts = _facts(read, frozenset(graph.written), speeds, topology, context)
    works, found = _fetched([works_of(op, facts) for op in started], started, facts)
    firsts = list(itertools.accumulate((len(each) for each in works), initial=0))
    tasks = []
    for number, each in enumerate(works):
        # The stages of an operator run one after the other; who waits for it waits for the last.
        after = tuple(firsts[i + 1] - 1 for i in (*waits[started[number].name], *found.get(number, ())))
        for stage, work in enumerate(each):
            follows = (firsts[number] + stage - 1,) if stage else after
            tasks.append(Task(duration(work, speeds, topology), follows, _stream(started[number], work)))
    return Timed(read.nodes, started, works, tasks, facts)


def _fetched(
    works: Sequence[tuple[Work, ...]], started: Sequence[Node], facts: Facts
) -> tuple[list[tuple[Work, ...]], dict[int, tuple[int, ...]]]:
    """Work with the bytes that were fetched before in the cache, and for each reader of such bytes the launches that fetch them.

    No device waits for what fetches; who reads bytes that are on their way would get them no sooner.
    """
    read, found, ahead = list(works), dict[int, tuple[int, ...]](), dict[str, int]()
    for number, (node, stages) in enumerate(zip(started, works, strict=True)):
        if stages[0].fetched_bytes:
            ahead[facts.resident[node.input[0]]] = number
        elif ahead and (own := [ahead.pop(name) for tensor in node.reads if (name := facts.resident.get(tensor, "")) in ahead]):
            whole = sum(facts.types[tensor].nbytes for tensor in node.reads if tensor in facts.resident)
            # Of experts that get no row nothing is read.
            cached = sum(works[fetch][0].fetched_bytes for fetch in own) * min(1.0, stages[0].hbm_bytes / whole)
            found[number] = tuple(own)
            first = replace(stages[0], hbm_bytes=stages[0].hbm_bytes - cached, cache_bytes=stages[0].cache_bytes + cached)
            read[number] = (first, *stages[1:])
    return read, found


def _stream(node: Node, work: Work) -> str:
    """The label of a launch's stream: GE fetches on one of its own (npu_prefetch of cann-recipes-infer@0cc6cd0, docs)."""
    return node.stream or (PREFETCH if work.fetched_bytes else "")


def _step(timed: Timed, speeds: Parameters) -> StepCost:
    started, works, tasks, firsts = timed.started, timed.works, timed.tasks, timed.firsts
    timeline = schedule(tasks)
    exposed = tuple(total(timeline.exposed[begin:end]) for begin, end in itertools.pairwise(firsts))
    moved = [sum(work.hbm_bytes + work.streamed_bytes + work.fetched_bytes for work in each) for each in works]
    sent = [sum(work.sent_bytes for work in each) for each in works]
    parts = total(timeline.exposed)
    parts["waiting"] = timeline.waiting_s
    return StepCost(
        step_ms=timeline.step_s * _MS,
        floor_ms=sum(moved) / speeds.hbm_bytes_per_s * _MS,
        parts_ms={cause: seconds * _MS for cause, seconds in parts.items()},
        operators=_grouped(started, moved, sent, exposed),
        launches=len(started),
        contended_ms={factor: schedule(tasks, factor).step_s * _MS for factor in CONTENTIONS},
        streams=_streams(started, works, [task.duration for task in tasks]),
        bodies=dict(Counter(map(kind_of, dict.fromkeys(body_of(op.name) for op in started)))),
        hbm_bytes=sum(moved),
        sent_bytes=sum(sent),
        context=timed.facts.context,
        chip=speeds.chip,
    )


def _streams(started: Sequence[Node], works: Sequence[Sequence[Work]], durations: Sequence[Duration]) -> dict[str, dict[str, float]]:
    streams, taken = dict[str, dict[str, float]](), iter(durations)
    for node, stages in zip(started, works, strict=True):
        stream = streams.setdefault(_stream(node, stages[0]) or "main", {"launches": 0, "busy_ms": 0.0})
        stream["launches"] += 1
        stream["busy_ms"] += sum(next(taken).total_s for _ in stages) * _MS
    return streams


def _facts(read: Nodes, written: frozenset[int], speeds: Parameters, topology: Topology, context: int) -> Facts:
    resident, pools = dict[str, str](), set[str]()
    for node in read.nodes:
        if node.type == OPERAND:
            resident[f"{node.name}:0"] = f"{node.name}:0"
            pools.update([f"{node.name}:0"] if node.operand in written else ())
        elif (node.type == "" or node.type in VIEWS) and node.input and (operand := resident.get(node.input[0])):
            results = [f"{node.name}:{port}" for port in range(node.results)]
            resident |= dict.fromkeys(results, operand)
            pools.update(results if node.input[0] in pools else ())
        for port, position in IN_PLACE.get(node.type, {}).items():
            if position < len(node.input) and node.input[position] in pools:
                resident[f"{node.name}:{port}"] = resident[node.input[position]]
                pools.add(f"{node.name}:{port}")
    rows = _routed(read, topology)
    return Facts(
        read.types, resident, frozenset(pools), context, topology.groups, speeds.cache_bytes, speeds.expert_skew,
        speeds.expert_imbalance, rows,
    )  # fmt: skip


def _routed(read: Nodes, topology: Topology) -> dict[str, Rows]:
    """The rows behind each list of group sizes that an operator reads."""
    ops, rows = {node.name: node for node in read.nodes}, dict[str, Rows]()
    for tensor in (tensor for node in read.nodes for slot in _GROUPS if (tensor := node.find(slot))):
        if tensor not in rows and (routed := routed_rows(ops, read.types, tensor, topology.groups.get("world", 1))) is not None:
            rows[tensor] = routed
    return rows


def _waits(nodes: Sequence[Node], number: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each launch the launches that it reads or is told to wait for, through views and what is computed at compile time."""
    sources: dict[str, tuple[int, ...]] = {}
    waits: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        before: set[int] = set()
        for producer in node.producers:
            before.update(sources.get(producer, ()))
        if node.name in number:
            waits[node.name] = tuple(before)
            sources[node.name] = (number[node.name],)
        elif before:
            sources[node.name] = tuple(before)
    return waits


def _grouped(
    started: Sequence[Node], moved: Sequence[float], sent: Sequence[float], exposed: tuple[dict[str, float], ...]
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
