"""A GE graph on an emulated device: the interface of torchair's `GeGraph`, over an interpreter that runs on the device's stream."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ..convert import shape_of
from ..ge_file import parse
from ..inspect_ge import follow_memory
from .checks import check_communication, check_formats, data_formats
from .compile_cache import compiled
from .device_state import DeviceState
from .ge_program import ORDERS, GeProgram, parsed_shape
from .memory import FORMAT_NAMES, DeviceTensor, allocate

DONATIONS = "ge.exec.outputReuseInputMemIndexes"
"""GE's option for outputs that lie in an input's memory: `input,output|input,output`, by number of the `Data` operator."""
FROZEN = "frozenInput"
"""torchair's option: 1 for each input whose memory never moves."""


@dataclass(frozen=True)
class _Operand:
    """One `Data` operator, and what its tensor was when the graph was compiled."""

    name: str
    declared: str
    format: int
    frozen: bool


class EmulatedGraph:
    """One graph of a process, see `device.GeEngine`; like torchair's, it is loaded, compiled, and then run many times.

    Args:
        state: of the device.
        serialized_model_def: a `ModelDef` of this rank.
        name: unique in the process.
    """

    def __init__(self, state: DeviceState, *, serialized_model_def: bytes, name: str) -> None:
        self._state, self.name = state, name
        self._model = parse(serialized_model_def)
        self._model.graph[0].name = name
        self._options: dict[str, str] | None = None
        self._program: GeProgram | None = None
        self._operands: list[_Operand] = []
        self._donations: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._outputs: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self._fingerprint = b""
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        """Fields of the graph's message, as torchair's own class gives them."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model.graph[0], name)

    def bind(self, operands: Sequence[torch.Tensor]) -> None:
        """Takes the operands' formats and addresses, before the graph is compiled: its `Data` operators say them from then on.

        Args:
            operands: by number of the `Data` operator.
        """
        # Reading a field of a message that another operator lacks would add it.
        for op in (op for op in self._model.graph[0].op if op.type == "Data"):
            number = op.attr["index"].i
            if isinstance(operand := operands[number], DeviceTensor):
                self._addresses[number] = operand.data_ptr()
                for desc in (op.output_desc[0], *op.input_desc[:1]):
                    desc.attr["format_for_int"].i = operand.allocation.format

    def load(self, options: Mapping[str, str], *, create_pg: bool = False) -> None:
        """Takes the compile options.

        Raises:
            LoweringError: process groups are to be created here, which only torchair's own frontend does.
        """
        if create_pg:
            raise LoweringError(f"{self.name}: create_pg is True; legal is False, communicators are made before")
        self._options = dict(options)

    def compile(self) -> None:
        """Checks everything that does not depend on values, and makes the order of operators.

        Raises:
            LoweringError: it is not loaded, or the device cannot run it, naming operator and both sides.
        """
        if self._options is None:
            raise LoweringError(f"{self.name} is compiled before it is loaded; legal is load, then compile")
        graph, state = self._model.graph[0], self._state
        self._donations = _pairs(self._options.get(DONATIONS, ""))
        # Nothing but edges orders streams: half of the ranks are as early in theirs as they can be, the others as late.
        self._program = GeProgram(self._model, order=ORDERS[2 + state.rank % 2])
        check_formats(graph)
        check_communication(self._program.steps, state, self.name)
        self._outputs = _declared_outputs(self._program, graph)
        self._operands = self._described(graph, self._program)
        self._fingerprint = _fingerprint(graph)
        compiled(self._options, state.version, self._fingerprint, [operand.format for operand in self._operands])

    def run(
        self, inputs: Sequence[torch.Tensor], assigned_outputs: Sequence[torch.Tensor | None] = (), stream: object = None
    ) -> list[torch.Tensor]:
        """Queues one step.

        Args:
            inputs: by number of the `Data` operator.
            assigned_outputs: memory of the outputs that lie in an input; None for the others.

        Returns:
            the outputs, which are not computed yet.

        Raises:
            LoweringError: the graph is not compiled, an operand is not what it was compiled for, an earlier step failed, or the first one
                is served.
            RuntimeError: the first step finds no memory for the graph.
        """
        program, state = self._program, self._state
        if program is None:
            raise LoweringError(f"{self.name} is run before it is compiled; legal is load, compile, run")
        if stream is not None:
            raise LoweringError(f"{self.name}: stream is {stream!r}; legal is None, the one stream of the device")
        state.count_step()
        fed = [self._checked(number, tensor) for number, tensor in enumerate(inputs)]
        if len(fed) != len(self._operands):
            raise LoweringError(f"{self.name} is fed {len(fed)} operands; it takes {len(self._operands)}")
        self._check_assigned(fed, assigned_outputs)
        outputs = [
            fed[self._donations[i]] if i in self._donations else allocate(state.stream, state.pinned, sizes, dtype)
            for i, (dtype, sizes) in enumerate(self._outputs)
        ]
        if not self._steps:
            state.check_first_run(self.name)
            state.feature_maps.take(program.feature_map_bytes)
        self._steps += 1
        state.stream.launch(f"step {self._steps} of {self.name}", lambda: self._step(program, fed, outputs))
        return list(outputs)

    def _described(self, graph: Any, program: GeProgram) -> list[_Operand]:
        """Operands by number; those that graphs write, parameters, and those of torchair's option must not move."""
        formats, flags = data_formats(graph), (self._options or {}).get(FROZEN, "").split(",")
        numbers = {f"{op.name}:0": op.attrs["index"] for op in program.data}
        flow = follow_memory((op for op in graph.op if op.type not in ("Data", "Const", "NetOutput")), numbers)
        written = {*flow.writers, *self._donations.values()}
        operands = []
        for op in sorted(program.data, key=lambda op: int(op.attrs["index"])):
            number = int(op.attrs["index"])
            frozen = number in written or op.name.startswith("params.") or flags[number : number + 1] == ["1"]
            operands.append(_Operand(op.name, op.results[0], formats[f"{op.name}:0"], frozen))
        return operands

    def _checked(self, number: int, tensor: torch.Tensor) -> DeviceTensor:
        where = self._state.name
        operand = self._operands[number] if number < len(self._operands) else None
        name = operand.name if operand is not None else f"number {number}"
        if not isinstance(tensor, DeviceTensor):
            raise LoweringError(f"operand {name} of {self.name} is a tensor of the host ({tensor.device}); legal is {where}")
        if tensor.allocation.stream is not self._state.stream:
            raise LoweringError(f"operand {name} of {self.name} is on {tensor.allocation.stream.name}; legal is {where}")
        if operand is None:
            raise LoweringError(f"{self.name} is fed operand {name}; it takes {len(self._operands)}")
        if tensor.allocation.format != operand.format:
            raise LoweringError(
                f"operand {name} of {self.name} is in {FORMAT_NAMES[tensor.allocation.format]}; the graph was compiled for"
                f" {FORMAT_NAMES[operand.format]}"
            )
        address = tensor.data_ptr()
        if operand.frozen and self._addresses[number] != address:
            raise LoweringError(f"operand {name} of {self.name} moved from {self._addresses[number]:#x} to {address:#x}; legal is the same")
        if operand.declared and shape_of(tensor) != operand.declared:
            raise LoweringError(f"operand {name} of {self.name} is {shape_of(tensor)}; the graph takes {operand.declared}")
        if not tensor.is_contiguous():
            raise LoweringError(f"operand {name} of {self.name} has strides {tensor.stride()}; legal is contiguous")
        return tensor

    def _check_assigned(self, fed: Sequence[DeviceTensor], assigned: Sequence[torch.Tensor | None]) -> None:
        given = {i: tensor for i, tensor in enumerate(assigned) if tensor is not None}
        if set(given) != set(self._donations):
            raise LoweringError(
                f"{self.name}: memory is given for outputs {sorted(given)}; the graph was compiled for outputs {sorted(self._donations)}"
            )
        for output, number in self._donations.items():
            tensor, operand = given[output], fed[number]
            if tensor.data_ptr() != operand.data_ptr():
                raise LoweringError(
                    f"{self.name}: output {output} is given memory at {tensor.data_ptr():#x}; it was compiled for that of operand"
                    f" {self._operands[number].name}, at {operand.data_ptr():#x}"
                )

    def _step(self, program: GeProgram, fed: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor]) -> None:
        """Runs one step, on the stream."""
        tensors = [tensor.read(operand.name) for operand, tensor in zip(self._operands, fed, strict=True)]
        order = [int(op.attrs["index"]) for op in program.data]
        with self._state.running(program):
            values = program.run([[tensors[i] for i in order]], self._state.exchange(self._fingerprint))[0]
        # Clone before writing: an output may be a view of another's operand.
        donated = [(i, values[i].clone()) for i in self._donations if values[i] is not fed[self._donations[i]].held]
        for i, (value, output) in enumerate(zip(values, outputs, strict=True)):
            if i not in self._donations:
                output.write(value, f"output {i}")
        for i, value in donated:
            outputs[i].held.copy_(value)


def _pairs(option: str) -> dict[int, int]:
    """Output -> number of the `Data` operator in whose memory it lies."""
    pairs = [pair.split(",") for pair in option.split("|") if pair]
    return {int(output): int(number) for number, output in pairs}


def _declared_outputs(program: GeProgram, graph: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and sizes of each output: GE must know them, since it allocates the outputs before a step."""
    known = {f"{op.name}:{port}": desc for op in graph.op for port, desc in enumerate(op.output_desc)}
    outputs = []
    for tensor, declared in program.results.items():
        meta = known[tensor].attr["_meta"].s.decode() if "_meta" in known[tensor].attr else ""
        parsed = parsed_shape(declared) or parsed_shape(meta)
        if parsed is None:
            raise LoweringError(f"the graph declares no sizes of its output {tensor}; legal are outputs of static sizes")
        outputs.append(parsed)
    return outputs


def _fingerprint(graph: Any) -> bytes:
    """16 bytes of what the members of a communicator must have in common: names, types and edges of all operators."""
    digest = hashlib.blake2b(digest_size=16)
    for op in graph.op:
        digest.update("\0".join((op.name, op.type, *op.input)).encode() + b"\1")
    return digest.digest()
