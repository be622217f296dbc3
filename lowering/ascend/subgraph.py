"""A part of a GE graph as a graph of its own, so that one operator or one layer can run alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...graphs.errors import LoweringError
from .convert import POSITIONAL, add_data, add_outputs
from .ge_file import GE_DTYPES, GeFile, messages, parse
from .inspect_ge import MemoryFlow, follow_memory
from .options import Operand, operand_options

_NOT_EMPTY = "ge.exec.allTensorNotEmpty"


@dataclass(frozen=True)
class Subgraph:
    """A part of a GE graph.

    Attributes:
        ge_file: the part; tensors that it reads and does not compute are its operands.
        operands: `name:port` of the tensor in the whole graph that each operand stands for.
        results: the same of its results, without the operands that it writes.
    """

    ge_file: GeFile
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def written(self) -> tuple[int, ...]:
        """Operands that it writes in place, or whose memory an output is bound to."""
        return tuple(sorted({*self.ge_file.bound, *(operand for _, operand in self.ge_file.donations)}))


class WholeGraph:
    """A GE graph from which parts are taken; it is parsed once.

    Attributes:
        ge_file: the whole.
        ops: its operators by name, in their order.
        results: tensors of the results, then of the donations.
        readers: names of the operators that read each tensor.
    """

    def __init__(self, ge_file: GeFile) -> None:
        self.ge_file = ge_file
        self.ops: dict[str, Any] = {op.name: op for op in parse(ge_file.graph).graph[0].op}
        self._names = list(self.ops)
        self.results = tuple(t for op in self.ops.values() if op.type == "NetOutput" for t in op.input if not t.endswith(":-1"))
        data = {ge_file.data[op.attr["index"].i]: f"{op.name}:0" for op in self.ops.values() if op.type == "Data"}
        self._donated = {self.results[output]: data[operand] for output, operand in ge_file.donations}
        self.readers: dict[str, list[str]] = {}
        for op in self.ops.values():
            for tensor in op.input:
                self.readers.setdefault(tensor, []).append(op.name)

    def producer(self, tensor: str) -> Any:
        """The operator that computes `name:port`."""
        return self.ops[tensor.rpartition(":")[0]]

    def bodies(self) -> dict[str, list[str]]:
        """Names of the operators of each call of a body, by the prefix of their names."""
        bodies: dict[str, list[str]] = {}
        for name in self._names:
            prefix = name.rpartition("/")[0]
            if prefix:
                bodies.setdefault(prefix, []).append(name)
        return bodies

    def cut(
        self,
        names: Collection[str],
        values: Mapping[str, torch.Tensor],
        results: Sequence[str] | None = None,
        rewired: Mapping[str, str] = MappingProxyType({}),
    ) -> Subgraph:
        """The operators of these names as a graph.

        Constants that they read come with them, and so does what computes tensors that cannot be operands (int4, uint64).

        Args:
            names: of operators that are neither `Data`, `Const` nor `NetOutput`.
            values: tensor -> a value with its dtype and shape, at least for all operands.
            results: tensors to return; None returns those that other operators of the whole graph read.
            rewired: tensor -> another of the same kind to read in its place.

        Raises:
            LoweringError: `values` lacks an operand.
        """
        inner = self._with_sources(names, values)
        read = [rewired.get(t, t) for name in inner for t in self._inputs(name)]
        operands = list(dict.fromkeys(t for t in read if t.rpartition(":")[0] not in inner))
        if missing := [tensor for tensor in operands if tensor not in values]:
            raise LoweringError(f"nothing is known of {missing[0]}, which {len(names)} operators of a part read")
        model = messages().ModelDef()
        model.graph.add().name = "part"
        ops = model.graph[0].op
        for i, tensor in enumerate(operands):
            add_data(ops, i, f"operand{i}", values[tensor])
        renamed = {**rewired, **{tensor: f"operand{i}:0" for i, tensor in enumerate(operands)}}
        for name in inner:
            _copy(ops.add(), self.ops[name], renamed, inner)
        flow = follow_memory(_writing(ops), {f"operand{i}:0": i for i in range(len(operands))})
        donated = self._donations(inner, operands, flow, ops)
        wanted = self._read_outside(inner, names) if results is None else results
        returned = [t for t in dict.fromkeys(wanted) if t in renamed or (flow.version.get(t, 0) == 0 and t not in donated.values())]
        outputs = [(tensor, values[tensor]) for tensor in (*returned, *donated.values())]
        add_outputs(model.graph[0], outputs, self._controls(inner), len(operands))
        ge_file = replace(
            self.ge_file,
            graph=model.SerializeToString(deterministic=True),
            options=self._options([values[tensor] for tensor in operands], len(returned), list(donated)),
            donations=tuple((len(returned) + i, operand) for i, operand in enumerate(donated)),
            bound=tuple(sorted(set(flow.writers) - set(donated))),
            inputs=len(operands),
            outputs=len(returned),
            patches=tuple(patch for patch in self.ge_file.patches if patch[0] in inner),
            feeds=None,
            folded=None,
        )
        return Subgraph(ge_file, tuple(operands), tuple(returned))

    def _inputs(self, name: str) -> list[str]:
        return [tensor for tensor in self.ops[name].input if tensor and not tensor.endswith(":-1")]

    def _with_sources(self, names: Collection[str], values: Mapping[str, torch.Tensor]) -> list[str]:
        """The names, and those of operators that must come with them, in the order of the graph."""
        needed, queue = set(names), list(names)
        while queue:
            for tensor in self._inputs(queue.pop()):
                op = self.producer(tensor)
                if op.name not in needed and op.type != "Data" and (op.type == "Const" or not _can_be_operand(values.get(tensor))):
                    needed.add(op.name)
                    queue.append(op.name)
        return [name for name in self._names if name in needed]

    def _read_outside(self, inner: Collection[str], asked: Collection[str]) -> list[str]:
        inside, tensors = set(inner), []
        for name in asked:
            ports = [f"{name}:{port}" for port in range(len(self.ops[name].output_desc))]
            tensors += [t for t in ports if not inside.issuperset(self.readers.get(t, ())) or t in self.results]
        return tensors

    def _donations(self, inner: Collection[str], operands: list[str], flow: MemoryFlow, ops: Any) -> dict[int, str]:
        """Operand -> the tensor whose output is bound to its memory: as in the whole graph, and where nobody reads a write in place."""
        inside, read = set(inner), {tensor for op in ops for tensor in op.input}
        donated = {
            operands.index(operand): tensor
            for tensor, operand in self._donated.items()
            if tensor.rpartition(":")[0] in inside and operand in operands
        }
        for operand, tensor in flow.latest.items():
            if operand in flow.writers and tensor not in read:
                donated.setdefault(operand, tensor)
        return dict(sorted(donated.items()))

    def _controls(self, inner: Collection[str]) -> list[str]:
        outputs = (op for op in self.ops.values() if op.type == "NetOutput")
        return [t for op in outputs for t in op.input if t.endswith(":-1") and t.removesuffix(":-1") in inner]

    def _options(self, operands: Sequence[torch.Tensor], results: int, donated: Sequence[int]) -> dict[str, str]:
        options = {key: value for key, value in self.ge_file.options.items() if key not in POSITIONAL}
        if _NOT_EMPTY in options and not all(tensor.numel() for tensor in operands):
            options[_NOT_EMPTY] = "0"
        carried = {operand: results + i for i, operand in enumerate(donated)}
        return options | operand_options([Operand(tensor, fixed=False) for tensor in operands], results, carried)


def _can_be_operand(value: torch.Tensor | None) -> bool:
    return value is not None and value.dtype in GE_DTYPES


def _copy(new: Any, op: Any, renamed: Mapping[str, str], inner: Collection[str]) -> None:
    new.CopyFrom(op)
    kept = [t for t in op.input if not t.endswith(":-1") or t.removesuffix(":-1") in inner]
    new.input[:] = [renamed.get(tensor, tensor) for tensor in kept]


def _writing(ops: Any) -> list[Any]:
    """Operators without control edges, which do not count where inputs are numbered."""
    bare = []
    for op in ops:
        new = type(op)()
        new.CopyFrom(op)
        new.input[:] = [tensor for tensor in op.input if not tensor.endswith(":-1")]
        bare.append(new)
    return bare
