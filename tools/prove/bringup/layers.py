"""One layer of each kind alone: ten steps on a device, its state included, against the interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.ge_file import GeFile
from ....lowering.ascend.operators.table import BY_TYPE, COMMUNICATING
from ....lowering.ascend.subgraph import Subgraph
from ...agreement.compare import Deviations
from ...progress import Bar
from .device_graph import DeviceGraph, Host
from .recording import BucketGraph, StepRecorder, Values, distinct_bodies
from .results import BringupFailure, Judgement, Timing
from .steps import PlannedStep

STEPS = 10


@dataclass(frozen=True)
class LayerCase:
    """A layer with the operands of some steps.

    Attributes:
        types: of its operators.
        operands: before the first step.
        fed: for each step the operands that change from outside, by number.
    """

    name: str
    part: Subgraph
    types: frozenset[str]
    operands: list[torch.Tensor]
    fed: list[dict[int, torch.Tensor]] = field(default_factory=list)
    assumption = "one-session"

    @property
    def graph(self) -> GeFile:
        """What is compiled."""
        return self.part.ge_file

    def judge(self, host: Host) -> Judgement:
        """Runs all steps on both sides; compares results and state."""
        try:
            graph = DeviceGraph(host, self.part.ge_file, self.operands)
        except LoweringError as error:
            return Judgement([BringupFailure.of("compiles", self.name, error)])
        oracle, operands, deviations = Interpreter(self.part.ge_file, Mesh()), list(self.operands), Deviations()
        times = []
        for number, fed in enumerate(self.fed):
            try:
                times.append(self._step(number, fed, graph, oracle, operands, deviations))
            except LoweringError as error:
                return Judgement([BringupFailure.of(self.assumption, self.name, error, f"step {number}: ")], spent=True)
        timing = Timing(self.name, "", sorted(times)[len(times) // 2], sum(operand.nbytes for operand in self.operands))
        wrong = deviations.beyond()
        listed = "; ".join(f"{name} from step {deviations.first_step[name]} on: {deviations.by_name[name]}" for name in wrong[:3])
        return Judgement([BringupFailure(assumption_of(self.types, wrong), self.name, listed)] if wrong else [], [timing])

    def _step(
        self,
        number: int,
        fed: Mapping[int, torch.Tensor],
        graph: DeviceGraph,
        oracle: Interpreter,
        operands: list[torch.Tensor],
        deviations: Deviations,
    ) -> float:
        for i, value in fed.items():
            if i not in graph.nz_operands:
                operands[i] = value
                graph.feed(i, value)
        before = {i: operands[i].clone() for i in self.part.written}
        expected = oracle([operands])[0]
        actual, seconds = graph.run()
        for tensor, right, value in zip(self.part.results, expected, actual, strict=True):
            deviations.add(number, tensor, right, value)
        for i, left in zip(self.part.written, graph.operands(self.part.written), strict=True):
            changed = (operands[i] != before[i]) | (left != before[i])
            deviations.add(number, f"state {self.part.operands[i]}", operands[i], left, changed)
        return seconds


def layer_cases(graph: BucketGraph, recorder: StepRecorder, steps: Sequence[PlannedStep], bar: Bar) -> tuple[list[LayerCase], list[str]]:
    """The layers of a bucket's graph that do not communicate, with what they see in these steps; and those that do."""
    cases, communicating = list[LayerCase](), list[str]()
    constant = {tensor for tensor, leaf in graph.operand.items() if leaf.part not in ("state", "inputs")}
    for number, step in enumerate(steps):
        values = recorder.run(step)
        if number == 0:
            communicating = _cut(graph, values, cases)
        for case in cases:
            # Recordings are changed by the next step where they are pools.
            changing = [i for i, t in enumerate(case.part.operands) if i not in case.part.written and t not in constant]
            case.fed.append({i: filled(values[case.part.operands[i]]).clone() for i in changing})
        bar.step(f"{graph.bucket.name} step {number}")
    return cases, communicating


def _cut(graph: BucketGraph, values: Values, cases: list[LayerCase]) -> list[str]:
    communicating = []
    for prefix, names in distinct_bodies(graph).items():
        ops = [graph.whole.ops[name] for name in names]
        types, name = frozenset(op.type for op in ops), f"{graph.bucket.name} {prefix}"
        if types & COMMUNICATING.keys():
            communicating.append(f"{name}: communicates, see the rung of buckets")
            continue
        part = graph.whole.cut([op.name for op in ops if op.type != "Const"], values)
        cases.append(LayerCase(name, part, types, [filled(values[tensor]).clone() for tensor in part.operands]))
    return communicating


def filled(value: torch.Tensor) -> torch.Tensor:
    """The value with noise in place of NaN: what follows from a NaN, such as the choice of a token, is not the same on all machines."""
    if not value.is_floating_point() or not bool(value.isnan().any()):
        return value.contiguous()
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)
    return torch.where(value.isnan(), noise, value).contiguous()


def assumption_of(types: frozenset[str], wrong: Sequence[str]) -> str:
    """The assumption that is wrong where a layer is, although each of its operators is right alone."""
    if all(name.startswith("state ") for name in wrong):
        return "write-after-read"
    trials = sorted((BY_TYPE[op_type].trial for op_type in types if op_type in BY_TYPE), key=lambda trial: trial.order)
    return next((trial.layer for trial in trials if trial.layer), "write-after-read")
