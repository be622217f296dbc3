"""Buckets and single operators of artifacts for captured graphs: the lowest rungs, in the form that torch_npu runs."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ....graphs.errors import LoweringError
from ....graphs.types import Bucket, Mesh
from ....lowering.artifact import graph_io
from ....lowering.ascend.acl_graph.file import AclFile
from ....lowering.ascend.acl_graph.inspect_acl import launches
from ....lowering.ascend.acl_graph.second_stream import FETCH
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.emulator.program import Step
from ....lowering.ascend.emulator.torch_program import TorchStep
from ....lowering.ascend.operators.record import Arguments
from ....lowering.ascend.operators.table import GROUP_ARGUMENTS
from ....runtime.device_params import LoadParams
from ...agreement.compare import first_mismatch
from ..all_ranks import load_ranks, run_step
from .device_graph import DeviceGraph, Host
from .recording import ShippedBucket
from .results import BringupFailure, Judgement, Timing
from .steps import PlannedStep


@dataclass(frozen=True)
class OperatorCall:
    """One operator with the arguments of rank 0 in a step.

    Attributes:
        vals: abstract values of its results.
        number: among those of its name in the bucket.
    """

    bucket: Bucket
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    vals: Any
    captured: bool
    number: int = 0

    @property
    def name(self) -> str:
        """Where it is, and which of its calls there: `decode-b2-q4 npu.npu_linear.default 3`."""
        return f"{self.bucket.name} {self.target} {self.number}"

    @property
    def assumption(self) -> str:
        """What it refutes if it is refused."""
        return "capture" if self.captured else "kernels"

    def judge(self, host: Host) -> Judgement:
        """Runs it."""
        return judge_call(host, self)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its operands."""
        tensors: list[torch.Tensor] = []
        map_aggregate((self.args, dict(self.kwargs)), lambda value: tensors.append(value) if isinstance(value, torch.Tensor) else None)
        return tensors

    @property
    def shapes(self) -> str:
        """Sizes of its operands, as in `4x256 256x640`."""
        return " ".join("x".join(map(str, value.shape)) or "scalar" for value in self.tensors)

    def file(self) -> AclFile:
        """A graph of this operator alone, run as its bucket is."""
        graph, operands = Graph(), list[Node]()

        def operand(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            operands.append(graph.placeholder(f"operand_{len(operands)}"))
            operands[-1].meta = {"val": torch.empty(value.shape, dtype=value.dtype, device="meta"), "leaf": f"inputs.{len(operands) - 1}"}
            return operands[-1]

        arguments: Any = map_aggregate((self.args, dict(self.kwargs)), operand)
        node = graph.call_function(_named(self.target), tuple(arguments[0]), dict(arguments[1]))
        node.meta["val"] = self.vals
        waits = self.target.startswith("_c10d_functional.")
        if waits:
            node = graph.call_function(_named("_c10d_functional.wait_tensor.default"), (node,))
            node.meta["val"] = self.vals
        results = [node]
        if not isinstance(self.vals, torch.Tensor):
            results = [graph.call_function(_named("operator.getitem"), (node, i)) for i in range(len(self.vals))]
            for result, val in zip(results, self.vals, strict=True):
                result.meta["val"] = val
        graph.output(tuple(results))
        cuts = (
            (len(operands),)
            if any(isinstance(arguments[1].get(name), Node) for name in ("actual_seq_lengths_kv", "actual_seq_kvlen"))
            else ()
        )
        nodes = 1 + waits if isinstance(self.vals, torch.Tensor) else 1 + len(self.vals)
        data = graph_io.encode(GraphModule(torch.nn.Module(), graph))
        return AclFile(data, len(operands), len(results), (), cuts, self.captured, (("", nodes),))


def _named(name: str) -> Callable[..., Any]:
    return graph_io.find_target(name) if name.startswith(("aten.", "operator.")) else graph_io.NamedOperator(name)


class CallRecorder:
    """Runs steps of a bucket on the CPU for all ranks, and keeps each distinct operator that launches, without collectives.

    Args:
        load_params: of a rank.
    """

    def __init__(
        self, graph: ShippedBucket, mesh: Mesh, load_params: Callable[[int], LoadParams], state: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self._graph, self._mesh, self._state = graph, mesh, state
        self._params = load_ranks(mesh, graph.signature, load_params)
        self.calls: dict[str, OperatorCall] = {}

    def run(self, step: PlannedStep) -> None:
        """Runs a step; keeps operators that differ in name, plain arguments, sizes or dtypes from those before."""
        run = functools.partial(self._graph.interpreter(self._mesh), observe=self._keep)
        run_step(run, self._mesh, self._graph.signature, self._params, self._state, step.tensors)

    def _keep(self, step: Step, call: Arguments) -> None:
        assert isinstance(step, TorchStep)
        (args, kwargs), node = call, step.node
        target = str(node.target)
        if target in GROUP_ARGUMENTS or target == FETCH or not launches([node]):
            return
        plain: Any = map_aggregate((args, dict(kwargs)), described)
        key = f"{target} {plain}"
        if key not in self.calls:
            copied: Any = map_aggregate((args, dict(kwargs)), _copied)
            # Every captured graph takes a stream, so one call of each operator is captured and the others are launched.
            in_stream = self._graph.file.captured
            number = sum(call.target == target for call in self.calls.values())
            captured = in_stream and not number
            arguments = tuple(copied[0]), dict(copied[1])
            self.calls[key] = OperatorCall(self._graph.bucket, target, *arguments, node.meta["val"], captured, number)


def _memory_format(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name)
    return found


# torch.save has no form for those, which clones have as an argument.
copyreg.pickle(torch.memory_format, lambda value: (_memory_format, (str(value).removeprefix("torch."),)))


def described(value: Any) -> Any:
    """An argument as text, without the values of tensors."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


def judge_call(host: Host, call: OperatorCall) -> Judgement:
    """Captures or launches an operator alone, and compares results and operands with its CPU kernel's."""
    file, operands = call.file(), call.tensors
    after = [operand.clone() for operand in operands]
    expected = Interpreter(file, Mesh())([after])[0]
    graph = None
    try:
        graph = DeviceGraph(host, file, operands)
        actual, seconds = graph.run()
        left = graph.operands([i for i in range(len(operands)) if i not in graph.nz_operands])
    except LoweringError as error:
        return Judgement([BringupFailure.of(call.assumption, call.name, error, f"{call.shapes}: ")], spent=graph is not None)
    timing = Timing(call.name, call.shapes, seconds, sum(value.nbytes for value in (*operands, *actual)))
    pairs = [*((f"result {i}", right, value) for i, (right, value) in enumerate(zip(expected, actual, strict=True)))]
    written_operands = [value for i, value in enumerate(after) if i not in graph.nz_operands]
    pairs += [(f"operand {i}", right, value) for i, (right, value) in enumerate(zip(written_operands, left, strict=True))]
    message = first_mismatch(pairs)
    return Judgement([BringupFailure("kernels", call.name, f"operands {call.shapes}: {message}")] if message else [], [timing])
