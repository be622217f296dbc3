"""Each collective of an artifact's graphs alone, on all ranks, with contents that depend on the rank."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from ....graphs.errors import LoweringError
from ....graphs.types import Bucket, Mesh
from ....lowering.artifact.artifact import Artifact
from ....lowering.ascend.acl_graph.file import AclFile, graph_of
from ....lowering.ascend.emulator.ge_program import parsed_shape
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.ge_file import GeFile
from ....lowering.ascend.operators.call import GeOp, read
from ....lowering.ascend.operators.record import NpuOperator
from ....lowering.ascend.operators.table import COMMUNICATING, COMMUNICATING_TARGETS, types_of
from ....lowering.device import Device
from ...agreement.compare import first_mismatch
from ...inspection.cost import chip_of
from ...ranks.rank_settings import RankPlace
from .captured import OperatorCall, described
from .device_graph import DeviceGraph, Host
from .rates import REPEATS, of_rank
from .recording import BucketGraph, CapturedBucket, ShippedBucket, shipped_buckets
from .results import COLLECTIVES, BringupFailure, Timing, Wanted

DISPATCH, COMBINE = "moe_dispatch", "moe_combine"
MOST_BYTES = 2**30
"""Most bytes of a collective on all ranks together for which each rank computes what all should have."""
FOUND = "a collective alone is wrong: "
"""Begins the message of a rank that found one, by which rank 0 knows it."""
NOT_ALONE = "covered by whole buckets: its operands are not declared, or rows are sent in another dtype than they come back in"
RATES = "rates of all dies"
LOADS = ("even", "uneven", "one set of experts", "the last experts")


class CollectiveError(LoweringError):
    """A collective gave a rank other values than documented."""


@dataclass(frozen=True)
class CollectiveCase:
    """One collective, or a dispatch of tokens to experts with the combine that brings them back.

    Attributes:
        label: of the operator, as in its graph.
        file: a graph of it alone.
        results: names of the results.
        kinds: dtype and shape of each operand.
        slots: GE's name of each operand, where it has any.
        loads: how tokens are spread over experts; one empty name for other collectives.
        experts: of all ranks, where tokens are sent to experts.
    """

    bucket: Bucket
    label: str
    record: NpuOperator
    file: GeFile | AclFile
    results: tuple[str, ...]
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    slots: tuple[str, ...]
    loads: tuple[str, ...] = ("",)
    experts: int = 0

    @property
    def collective(self) -> str:
        """Its name in partitioned graphs."""
        return self.record.collective

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.bucket.name} {self.label}"

    @property
    def shapes(self) -> str:
        """Of the operands of one rank."""
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in self.kinds)

    @property
    def moved_bytes(self) -> int:
        """Of the operands of one rank."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.kinds)

    @property
    def assumption(self) -> str:
        """What it refutes if it is wrong."""
        return self.record.trial.wrong

    def operands(self, rank: int, load: str) -> list[torch.Tensor]:
        """Contents of a rank; any rank can compute those of every other."""
        generator, values = torch.Generator().manual_seed(1 + rank), []
        for slot, (dtype, shape) in zip(self.slots, self.kinds, strict=True):
            if slot == "expert_ids":
                value = expert_ids(load, shape, self.experts, rank, generator)
            elif slot == "expert_scales":
                value = torch.rand(shape, generator=generator) + 0.125
            elif dtype.is_floating_point:
                value = torch.randn(shape, generator=generator)
            else:
                value = torch.randint(0, 100, shape, generator=generator)
            values.append(value.to(dtype))
        return values


def expert_ids(load: str, shape: tuple[int, ...], experts: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    """Experts of each token [T, X], different ones for its choices."""
    tokens, choices = shape
    if load == "even":
        return (torch.arange(tokens * choices).reshape(shape) + rank * choices) % experts
    if load == "uneven":
        weights = 1.0 / (1 + torch.arange(experts, dtype=torch.float32)) ** 2
        return torch.multinomial(weights.expand(tokens, -1), choices, generator=generator)
    first = 0 if load == "one set of experts" else experts - choices
    return torch.arange(first, first + choices).expand(shape)


def collective_cases(graphs: Sequence[ShippedBucket], mesh: Mesh) -> tuple[list[CollectiveCase], list[str]]:
    """The distinct collectives of all graphs, and those that are left out with the reason."""
    cases: list[CollectiveCase] = []
    seen: set[tuple[str, ...]] = set()
    left_out: list[str] = []
    for graph in graphs:
        for key, label, make in _found(graph):
            if key in seen:
                continue
            seen.add(key)
            case = make()
            size = 0 if case is None else case.moved_bytes * mesh.size**2
            if case is None or size > MOST_BYTES:
                left_out.append(f"{graph.bucket.name} {label}: {NOT_ALONE if case is None else f'{size:,} bytes'}")
            else:
                cases.append(case)
    return cases, left_out


Found = tuple[tuple[str, ...], str, Callable[[], CollectiveCase | None]]
"""A collective of a graph: what distinguishes it from others, its label, and what makes a case of it."""


@functools.singledispatch
def _found(graph: ShippedBucket) -> Iterator[Found]:
    raise TypeError(f"{type(graph).__name__} is no bucket of a graph for NPUs")


@_found.register
def _of_ge(graph: BucketGraph) -> Iterator[Found]:
    for message in graph.whole.ops.values():
        if message.type in COMMUNICATING:
            op = read(message)
            key = (op.type, str(sorted(op.attrs.items())), *(graph.declared(t) if t else "" for t in op.inputs), *op.results)
            yield key, str(op), functools.partial(_case, graph, op)


@_found.register
def _of_captured(graph: CapturedBucket) -> Iterator[Found]:
    for node in graph_of(graph.file).graph.nodes:
        if (record := COMMUNICATING_TARGETS.get(str(node.target))) is not None:
            arguments: Any = map_aggregate(
                (node.args, dict(node.kwargs)), lambda value: value.meta["val"] if isinstance(value, Node) else value
            )
            call = OperatorCall(graph.bucket, str(node.target), tuple(arguments[0]), dict(arguments[1]), node.meta["val"], captured=False)
            label = f"{node.name} ({node.target})"
            yield (str(node.target), str(map_aggregate(arguments, described))), label, functools.partial(_call_case, label, record, call)


def _call_case(label: str, record: NpuOperator, call: OperatorCall) -> CollectiveCase | None:
    if record.own_group:
        return None
    kinds = tuple((value.dtype, tuple(value.shape)) for value in call.tensors)
    file = call.file()
    return CollectiveCase(call.bucket, label, record, file, tuple(f"result {i}" for i in range(file.outputs)), kinds, ("",) * len(kinds))


def _case(graph: BucketGraph, op: GeOp) -> CollectiveCase | None:
    names, part_of, collective = [op.name], graph.whole, COMMUNICATING[op.type].collective
    if collective == COMBINE:
        names = [_dispatch_of(graph, op), op.name]
    tensors = [f"{name}:{port}" for name in names for port in range(len(part_of.ops[name].output_desc))]
    values = {t: torch.empty(kind[1], dtype=kind[0]) for t in (*tensors, *_inputs(graph, names)) if (kind := _kind(graph, t))}
    rewired = {}
    if collective == COMBINE:
        rows = dict(zip(op.slots, op.inputs, strict=True))["expand_x"]
        sent = f"{names[0]}:0"
        if rows not in values or sent not in values or values[rows].dtype != values[sent].dtype:
            return None
        # The experts are left out: rows come back as they were sent.
        rewired = {rows: sent}
    try:
        part = part_of.cut(names, values, [f"{op.name}:{port}" for port in range(len(op.results))], rewired)
    except LoweringError:
        return None
    slots = {
        t: slot for name in reversed(names) for slot, t in zip(read(part_of.ops[name]).slots, read(part_of.ops[name]).inputs, strict=True)
    }
    kinds = tuple((values[t].dtype, tuple(values[t].shape)) for t in part.operands)
    named = (str(op), COMMUNICATING[op.type], part.ge_file, part.results, kinds, tuple(slots[t] for t in part.operands))
    if collective not in (DISPATCH, COMBINE):
        return CollectiveCase(graph.bucket, *named)
    return CollectiveCase(graph.bucket, *named, LOADS, int(op.attrs["moe_expert_num"]))


def _kind(graph: BucketGraph, tensor: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return parsed_shape(graph.declared(tensor))


def _inputs(graph: BucketGraph, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield from (t for t in read(graph.whole.ops[name]).inputs if t)


def _dispatch_of(graph: BucketGraph, combine: GeOp) -> str:
    """The dispatch whose record of origins a combine reads."""
    tensor = dict(zip(combine.slots, combine.inputs, strict=True))["assist_info_for_combine"]
    while (op := graph.whole.producer(tensor)).type not in types_of(DISPATCH):
        tensor = op.input[0]
    return str(op.name)


def run_collectives(
    host: Host, cases: Sequence[CollectiveCase], mesh: Mesh, rank: int, communicators: Mapping[str, str], watch: CollectiveWatch
) -> list[BringupFailure]:
    """Runs all collectives on this rank; all ranks call it at once, and none stops early, so that none waits for one that did.

    Returns:
        failures that `watch` does not know.

    Raises:
        CollectiveError: the device fails in one.
    """
    failures: list[BringupFailure] = []
    for case in cases:
        watch.begin(case.name, case.assumption)
        oracle, graph = Interpreter(case.file, mesh), None
        of_case, seconds = list[BringupFailure](), 0.0
        for load in case.loads:
            of_all = [case.operands(other, load) for other in range(mesh.size)]
            try:
                graph = graph or DeviceGraph(host, case.file, of_all[rank], rank, communicators)
                for index, operand in enumerate(of_all[rank]):
                    graph.feed(index, operand)
                actual, _ = graph.run()
                # Of the first load, which is even; all ranks run it as often.
                seconds = seconds or min(graph.run()[1] for _ in range(REPEATS))
            except LoweringError as error:
                raise CollectiveError(f"{FOUND}[{case.assumption}] {case.name}: rank {rank}: {error}") from error
            expected = oracle([[operand.clone() for operand in operands] for operands in of_all])[rank]
            if message := _difference(case, expected, actual):
                of_case.append(BringupFailure(case.assumption, case.name, f"rank {rank}{', load ' + load if load else ''}: {message}"))
        failures += watch.end(of_case[:1], [Timing(case.name, case.shapes, seconds, case.moved_bytes)])
    return failures


def _difference(case: CollectiveCase, expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str:
    if case.collective != DISPATCH:
        pairs = list(zip(case.results, expected, actual, strict=True))
    else:
        # Rows, counts of each expert and counts of each source; the record of origins is for the combine alone.
        counts = expected[3]
        rows = [in_order(side[0], counts) for side in (expected, actual)]
        pairs = [("rows", rows[0], rows[1]), ("tokens of experts", counts, actual[3]), ("tokens of ranks", expected[4], actual[4])]
    return first_mismatch(pairs)


def in_order(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Received rows [R, M], those of each expert in an order that depends on their contents alone; rows of no expert are left out."""
    key = rows.double() @ torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts, start = [], 0
    for count in counts.tolist():
        part = slice(start, start + count)
        parts.append(rows[part][key[part].argsort()])
        start += count
    return torch.cat(parts) if parts else rows[:0]


class CollectiveWatch:
    """Is told of collectives; this one, of all ranks but the first, hands failures on."""

    def begin(self, name: str, assumption: str) -> None:
        """A collective begins, or the measurement of the dies."""

    def end(self, failures: list[BringupFailure], timings: Sequence[Timing] = (), facts: Mapping[str, Any] = {}) -> list[BringupFailure]:
        """It has ended; returns those of its failures that the rank has to tell by itself."""
        return failures


@dataclass
class CollectivesCheck:
    """What a rank does before it loads anything (`RankSettings.before_loading`): it runs all collectives with the other ranks.

    Attributes:
        skip: names of those that are not run.
        wanted: cases that are.
        watch: of this process; other ranks have none.
        count: collectives that there are.
        left_out: others, and why.
    """

    skip: frozenset[str] = frozenset()
    wanted: Wanted = field(default_factory=Wanted)
    watch: CollectiveWatch = field(default_factory=CollectiveWatch)
    count: int = 0
    left_out: list[str] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[CollectivesCheck], tuple[frozenset[str], Wanted]]:
        """What other ranks get of it."""
        return CollectivesCheck, (self.skip, self.wanted)

    def __call__(self, artifact: Artifact, device: Device, place: RankPlace, communicators: Mapping[str, str]) -> None:
        """Runs them, and measures each die.

        Raises:
            CollectiveError: naming the collective, the rank and both values.
        """
        mesh = Mesh.parse(artifact.manifest.mesh)
        cases, self.left_out = collective_cases(shipped_buckets(artifact), mesh)
        self.count, wanted = (
            len(cases),
            [case for case in cases if case.name not in self.skip and self.wanted.takes(COLLECTIVES, case.name)],
        )
        with tempfile.TemporaryDirectory(prefix="npucompile-") as scratch:
            host = Host(device, Path(scratch))
            failures = run_collectives(host, wanted, mesh, place.rank, communicators, self.watch)
            if RATES not in self.skip and self.wanted.takes(COLLECTIVES, RATES):
                self.watch.begin(RATES, "measurements")
                facts = of_rank(host, chip_of(artifact.manifest), place.rank, mesh.size, place.store)
                self.watch.end([], facts=facts)
        if failures:
            raise CollectiveError(f"{FOUND}[{failures[0].assumption}] {failures[0].what}: {failures[0].message}")


def failure_in(message: str) -> BringupFailure | None:
    """The failure that a `CollectiveError` of any rank tells of; None for another error."""
    match = re.search(re.escape(FOUND) + r"\[([\w-]+)\] (.*?): (rank .*)", message, re.DOTALL)
    return BringupFailure(match[1], match[2], match[3]) if match else None
