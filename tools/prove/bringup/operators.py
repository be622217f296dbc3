"""Each operator of an artifact's graphs alone, on a device against its CPU kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Bucket, Mesh
from ....lowering.ascend.emulator.ge_program import BORDER
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.ge_file import GeFile
from ....lowering.ascend.operators.call import GeOp, read
from ....lowering.ascend.operators.table import BY_TYPE, COMMUNICATING
from ....lowering.ascend.operators.trials import Trial
from ....lowering.ascend.subgraph import Subgraph, WholeGraph
from ....lowering.switches import NZ
from ...agreement.compare import first_mismatch, mismatch
from .device_graph import DeviceGraph, Host
from .operands import variants
from .recording import Values, is_int4
from .results import BringupFailure, Judgement, Timing

MOST = 400
"""Distinct operators that are run; beyond it only the smallest and the largest shapes of each type, dtypes and attributes."""


@dataclass(frozen=True)
class OperatorCase:
    """One operator with the operands of a recorded step.

    Attributes:
        family: type, attributes and dtypes.
        elements: of all operands and results.
    """

    bucket: Bucket
    op: GeOp
    subgraph: Subgraph
    operands: Mapping[str, torch.Tensor]
    family: tuple[str, ...]
    elements: int

    @property
    def name(self) -> str:
        """Where it is: `decode-b2-q4 layer00/MatMul (MatMul)`."""
        return f"{self.bucket.name} {self.op}"

    @property
    def graph(self) -> GeFile:
        """What is compiled."""
        return self.subgraph.ge_file

    @property
    def trial(self) -> Trial:
        """How the operator is tried."""
        return BY_TYPE[self.op.type].trial

    @property
    def assumption(self) -> str:
        """What it refutes if it is refused."""
        return self.trial.refused

    def judge(self, host: Host) -> Judgement:
        """Runs it with all its operands."""
        return judge_operator(host, self)

    @property
    def shapes(self) -> str:
        """Shapes of its operands, as in `4x256 256x640`."""
        return " ".join("x".join(map(str, self.operands[t].shape)) or "scalar" for t in self.subgraph.operands)


def distinct_operators(bucket: Bucket, whole: WholeGraph, values: Values) -> dict[tuple[str, ...], OperatorCase]:
    """The operators of a graph that differ in type, attributes, dtypes or shapes, but no collectives and none of constants alone."""
    cases: dict[tuple[str, ...], OperatorCase] = {}
    for message in whole.ops.values():
        if message.type in BORDER or message.type in COMMUNICATING or not _recorded(message, whole, values):
            continue
        op = read(message)
        shapes = tuple(_shape(values.get(tensor), whole, tensor) for tensor in op.inputs)
        dtypes = tuple(shape.partition(" ")[0] for shape in shapes)
        attributes = tuple(f"{key}={value}" for key, value in sorted(op.attrs.items()))
        key = (op.type, *attributes, *shapes)
        if key in cases:
            continue
        results = [f"{op.name}:{port}" for port in range(len(op.results)) if f"{op.name}:{port}" in values]
        part = whole.cut([op.name], values, results)
        if part.operands and (part.results or part.written):
            elements = sum(values[tensor].numel() for tensor in (*part.operands, *results))
            operands = {tensor: values[tensor] for tensor in part.operands}
            cases[key] = OperatorCase(bucket, op, part, operands, (op.type, *attributes, *dtypes), elements)
    return cases


def chosen(cases: Sequence[OperatorCase], most: int = MOST) -> tuple[list[OperatorCase], list[OperatorCase]]:
    """The cases to run, in order of risk, and those that are left out because there are more than `most`."""
    selected = list(cases)
    if len(cases) > most:
        families: dict[tuple[str, ...], list[OperatorCase]] = {}
        for case in cases:
            families.setdefault(case.family, []).append(case)
        sizes = [sorted(family, key=lambda case: case.elements) for family in families.values()]
        selected = [case for family in sizes for case in ([family[0], family[-1]] if len(family) > 1 else family)]
    selected.sort(key=lambda case: (case.trial.order, case.op.type, case.elements))
    identities = {id(case) for case in selected}
    return selected, [case for case in cases if id(case) not in identities]


def judge_operator(host: Host, case: OperatorCase) -> Judgement:
    """One operator with all its operands: the first failure, and its time on recorded ones."""
    slots = dict(zip(reversed(case.op.inputs), reversed(case.op.slots), strict=True))
    by_slot = {slots.get(tensor, tensor): tensor for tensor in case.subgraph.operands}
    constants = _constants(case)
    recorded = {**constants, **{slot: case.operands[tensor] for slot, tensor in by_slot.items()}}
    written = frozenset(slot for slot, tensor in by_slot.items() if case.subgraph.operands.index(tensor) in case.subgraph.written)
    oracle, graph, timings = Interpreter(case.subgraph.ge_file, Mesh()), None, list[Timing]()
    for name, drawn in variants(case.op, recorded, written):
        operands = [drawn[slot].contiguous() for slot in by_slot]
        expected_operands = [operand.clone() for operand in operands]
        expected = oracle([expected_operands])[0]
        try:
            graph = DeviceGraph(host, case.subgraph.ge_file, operands) if graph is None or graph.nz_operands else graph
        except LoweringError as error:
            return Judgement([BringupFailure.of(case.assumption, case.name, error, f"{case.shapes}: ")], timings)
        try:
            for index, operand in enumerate(operands):
                if index not in graph.nz_operands:
                    graph.feed(index, operand)
            actual, seconds = graph.run()
            left = graph.operands(case.subgraph.written)
        except LoweringError as error:
            return Judgement(
                [BringupFailure.of(case.assumption, case.name, error, f"{name} operands {case.shapes}: ")], timings, spent=True
            )
        timings = timings or [Timing(case.name, case.shapes, seconds, sum(tensor.nbytes for tensor in (*operands, *expected)))]
        pairs = [*zip(case.subgraph.results, expected, actual, strict=True)]
        pairs += [
            (f"operand {case.subgraph.operands[i]}", expected_operands[i], value)
            for i, value in zip(case.subgraph.written, left, strict=True)
        ]
        if message := first_mismatch(pairs):
            in_nz = bool(graph.nz_operands) and _right_in_nd(host, case, operands, expected)
            assumption = "nz-weights" if in_nz else case.trial.wrong
            return Judgement([BringupFailure(assumption, case.name, f"{name} operands {case.shapes}: {message}")], timings)
    return Judgement(timings=timings)


def _right_in_nd(host: Host, case: OperatorCase, operands: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether an operator that is wrong with its weight in NZ is right with all operands row-major."""
    try:
        results, _ = DeviceGraph(host, case.subgraph.ge_file, operands, off=frozenset({NZ})).run()
    except LoweringError:
        return False
    return not any(mismatch(right, value) for right, value in zip(expected, results, strict=True))


def _recorded(message: Any, whole: WholeGraph, values: Values) -> bool:
    """Whether the operator was part of the recording, with all that it reads and gives, and gives something that can be returned.

    Of what is not run of a recording some results are drawn, but none of the operands that lead to them.
    """
    ports = [f"{message.name}:{port}" for port in range(len(message.output_desc))]
    known = all(tensor in values or is_int4(whole.producer(tensor)) for tensor in read(message).inputs if tensor)
    return known and bool(ports) and all(port in values for port in ports) and values[ports[0]].dtype != torch.uint64


def _shape(value: torch.Tensor | None, whole: WholeGraph, tensor: str) -> str:
    if value is None:
        return "absent" if not tensor else "int4"
    constant = " constant" if whole.producer(tensor).type == "Const" else ""
    return f"{value.dtype}{constant} {list(value.shape)}"


def _constants(case: OperatorCase) -> dict[str, torch.Tensor]:
    """Constant inputs by GE's name: sizes and axes that the generators of operands need."""
    whole = WholeGraph(case.subgraph.ge_file)
    by_tensor = {f"{op.name}:0": read(op).attrs["value"] for op in whole.ops.values() if op.type == "Const"}
    return {slot: by_tensor[tensor] for slot, tensor in zip(case.op.slots, case.op.inputs, strict=True) if tensor in by_tensor}
