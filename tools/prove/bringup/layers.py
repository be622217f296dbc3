"""One layer of each kind alone: ten steps on a device, its state included, against the interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.operators.table import BY_TYPE, COMMUNICATING
from ....lowering.ascend.subgraph import Subgraph
from ...agreement.compare import Deviations
from ...progress import Bar
from .device_graph import DeviceGraph, Host
from .recording import BucketGraph, Recorder, Values, distinct_bodies
from .results import Failure, Timing
from .steps import PlannedStep

STEPS = 10


@dataclass
class LayerRun:
    """A layer on both sides: the graph on the device, and its operands on the CPU.

    Attributes:
        types: of its operators.
    """

    name: str
    part: Subgraph
    types: frozenset[str]
    graph: DeviceGraph
    operands: list[torch.Tensor]
    oracle: Interpreter
    deviations: Deviations = field(default_factory=Deviations)
    seconds: list[float] = field(default_factory=list)

    def step(self, number: int, values: Values) -> None:
        """Runs one step on both sides and adds up the differences of results and state.

        Raises:
            LoweringError: the device fails.
        """
        for i, tensor in enumerate(self.part.operands):
            if i not in self.part.written and i not in self.graph.nz_operands:
                self.operands[i] = filled(values[tensor])
                self.graph.feed(i, self.operands[i])
        before = {i: self.operands[i].clone() for i in self.part.written}
        expected = self.oracle([self.operands])[0]
        actual, seconds = self.graph.run()
        self.seconds.append(seconds)
        for tensor, right, value in zip(self.part.results, expected, actual, strict=True):
            self.deviations.add(number, tensor, right, value)
        for i, left in zip(self.part.written, self.graph.operands(self.part.written), strict=True):
            changed = (self.operands[i] != before[i]) | (left != before[i])
            self.deviations.add(number, f"state {self.part.operands[i]}", self.operands[i], left, changed)

    def failure(self) -> Failure | None:
        """What is wrong after all steps."""
        wrong = self.deviations.beyond()
        if not wrong:
            return None
        listed = "; ".join(f"{name} from step {self.deviations.first_step[name]} on: {self.deviations.by_name[name]}" for name in wrong[:3])
        return Failure(assumption_of(self.types, wrong), self.name, listed)


def run_layers(
    host: Host, graph: BucketGraph, recorder: Recorder, steps: Sequence[PlannedStep], bar: Bar
) -> tuple[list[Failure], list[Timing], list[str]]:
    """Runs the layers of a bucket's graph that do not communicate.

    Args:
        steps: whose recordings are the layers' operands.

    Returns:
        failures, the median time of each layer, and the layers that communicate.
    """
    layers: list[LayerRun] = []
    failures: list[Failure] = []
    communicating: list[str] = []
    for number, step in enumerate(steps):
        values = recorder.run(step)
        if number == 0:
            communicating = _open(host, graph, values, layers, failures)
        for layer in list(layers):
            try:
                layer.step(number, values)
            except LoweringError as error:
                failures.append(Failure("one-session", layer.name, f"step {number}: {error}"))
                return failures, [], communicating
        bar.step(f"{graph.bucket.name} step {number}")
    failures += [failure for layer in layers if (failure := layer.failure())]
    timings = [
        Timing(layer.name, "", sorted(layer.seconds)[len(layer.seconds) // 2], sum(operand.nbytes for operand in layer.operands))
        for layer in layers
    ]
    return failures, timings, communicating


def _open(host: Host, graph: BucketGraph, values: Values, layers: list[LayerRun], failures: list[Failure]) -> list[str]:
    communicating = []
    for prefix, names in distinct_bodies(graph).items():
        ops = [graph.whole.ops[name] for name in names]
        types, name = frozenset(op.type for op in ops), f"{graph.bucket.name} {prefix}"
        if types & COMMUNICATING.keys():
            communicating.append(f"{name}: communicates, see the rung of buckets")
            continue
        part = graph.whole.cut([op.name for op in ops if op.type != "Const"], values)
        operands = [filled(values[tensor]).clone() for tensor in part.operands]
        try:
            on_device = DeviceGraph(host, part.ge_file, operands)
        except LoweringError as error:
            failures.append(Failure("compiles", name, str(error)))
            continue
        layers.append(LayerRun(name, part, types, on_device, operands, Interpreter(part.ge_file, Mesh())))
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
