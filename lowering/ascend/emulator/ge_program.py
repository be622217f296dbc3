"""GE graphs as programs: memory as GE lays it out, and what depends on constants alone computed once."""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import DTYPES, Mesh
from ..convert import shape_of
from ..inspect_ge import misnamed, shape
from ..operators.call import Call, GeOp, Results, Value, group_of, read
from ..operators.table import BY_TYPE, FUNCTIONS, GROUP_FUNCTIONS, VIEWS, WRITES
from .program import EmulatedProgram, Exchange, MeshExchange, Step, Values, set_last_uses

ORDERS = ("file", "reversed-ready", "sides-first", "sides-last")
BORDER = ("Data", "Const", "NetOutput")
"""Types of operators that are not run: operands, constants and the list of results."""
# Folded values stay in memory as long as the program; larger ones than a compressed attention mask are computed in each step.
_FOLDED_BYTES = 8 << 20
# Graphs of many buckets have equal masks: tensors of at least so many bytes are kept once a process.
_SHARED_BYTES = 64 << 10
_shared: weakref.WeakValueDictionary[tuple[torch.dtype, torch.Size, bytes], torch.Tensor] = weakref.WeakValueDictionary()
# Lists of sizes, axes and positions are short.
_LISTED = 64
_GROUP_ATTRIBUTES = ("group", "group_ep")


class GeStep(Step):
    """An operator of GE, whose result is in the memory that GE gives it."""

    def __init__(self, op: GeOp, numbers: Mapping[str, int]) -> None:
        self.label = self.op = op
        self._function, self._finished = FUNCTIONS.get(op.type), False
        self.group = "" if self._function is not None else group_of(Call(op, []))
        if self.group:
            self.exchange, self.rank = BY_TYPE[op.type].exchange, op.attrs.get("ep_rank_id")
            self.members = op.attrs.get("ep_world_size", op.attrs.get("rank_size"))
        self.inputs = tuple(numbers[tensor] if tensor else -1 for tensor in op.inputs)
        self.outputs = tuple(numbers[tensor] for tensor in _outputs(op))
        self._declared = tuple(parsed_shape(text) for text in op.results)
        self.writes: Mapping[int, int] = WRITES.get(op.type, {})
        self.view = op.type in VIEWS

    def taken_bytes(self) -> dict[int, int]:
        """Bytes of the memory that its outputs take, by number."""
        outputs = [] if self.view else [(port, number) for port, number in enumerate(self.outputs) if port not in self.writes]
        kinds = [(number, declared) for port, number in outputs if (declared := self._declared[port])]
        return {number: math.prod(sizes) * dtype.itemsize for number, (dtype, sizes) in kinds}

    def call(self, values: Values) -> Call:
        """Its inputs."""
        inputs = [values[i] if i >= 0 else None for i in self.inputs]
        return Call(self.op, inputs, {*_GROUP_ATTRIBUTES}) if self.group else Call(self.op, inputs)

    def run(self, call: Call) -> Results:
        """Calls the function of its type."""
        assert self._function is not None
        return self._function(call)

    def run_group(self, calls: list[Call], wanted: Sequence[int] | None = None) -> Sequence[Results]:
        """Calls the function of its type for all members."""
        return GROUP_FUNCTIONS[self.op.type](calls, wanted)

    def tensors(self, call: Call) -> list[torch.Tensor]:
        """Its inputs.

        Raises:
            LoweringError: one is int4.
        """
        return [_tensor(f"an input of {self.op}", value) for value in call.values if value is not None]

    def of_member(self, call: Call, tensors: Sequence[torch.Tensor]) -> Call:
        """The same operator with the inputs of a member."""
        theirs = iter(tensors)
        return Call(self.op, [None if value is None else next(theirs) for value in call.values])

    def store(self, call: Call, results: Results, values: Values) -> None:
        """Puts its results in their memory.

        Raises:
            LoweringError: it has an input or attribute that its function does not read, or a result is not what the graph declares.
        """
        if not self._finished:
            call.finish()
            self._finished = True
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(self.outputs):
            raise LoweringError(f"{self.op} gives {len(results)} values, the graph says {len(self.outputs)}")
        for port, value in enumerate(results):
            values[self.outputs[port]] = self._in_memory(call, port, value)

    def _in_memory(self, call: Call, port: int, value: Value) -> Value:
        """A result in the memory that GE gives it: that of the input which it overwrites or views, or its own."""
        if not isinstance(value, torch.Tensor):
            return value
        declared = self._declared[port]
        if declared is None or value.shape != declared[1] or value.dtype != declared[0]:
            _check_result(self.op, port, value)
        written = self.writes.get(port)
        if written is not None:
            return _tensor(self.op.inputs[written], call.values[written]).copy_(value)
        if self.view:
            return value.contiguous()
        memory = value.untyped_storage().data_ptr()
        for operand in call.values:
            if operand is not None and _memory(operand) == memory:
                return value.clone(memory_format=torch.contiguous_format)
        return value.contiguous()


class GeProgram(EmulatedProgram):
    """The operators of a graph in an order in which they may run.

    Memory behaves as in GE: operators that write in place write their input, views share memory with their input, everything else gets
    memory of its own. Each result must have the dtype and sizes that the graph declares.

    Attributes:
        data: `Data` operators, in the order of the file.
        results: tensors of the results with the dtype and sizes that the graph declares for each.

    Args:
        model: a `ModelDef` message.
        order: one of `ORDERS`, see `Interpreter`.

    Raises:
        LoweringError: the graph has an unknown operator or an input without a producer.
    """

    def __init__(self, model: Any, *, order: str = "file") -> None:
        if order not in ORDERS:
            raise LoweringError(f"order is {order!r}; legal are {', '.join(ORDERS)}")
        if len(model.graph) != 1:
            raise LoweringError(f"the model has {len(model.graph)} graphs; legal is one, without calls")
        super().__init__()
        ops = [read(op) for op in model.graph[0].op]
        _check_known(ops)
        if breaches := misnamed(model.graph[0].op):
            raise LoweringError("; ".join(breaches))
        self.data = [op for op in ops if op.type == "Data"]
        self.operands, self.results = len(self.data), _results(model.graph[0].op)
        self._numbers = {name: i for i, name in enumerate(tensor for op in ops for tensor in _outputs(op))}
        self._start: Values = [None] * len(self._numbers)
        for op in ops:
            if op.type == "Const":
                self._start[self._numbers[f"{op.name}:0"]] = _constant(op)
        inner = [op for op in ops if op.type not in BORDER]
        ordered = inner if order == "file" else _in_order(inner, order)
        steps = self._unfolded([GeStep(op, self._numbers) for op in ordered])
        constants = {number for number, value in enumerate(self._start) if value is not None}
        set_last_uses(steps, {*constants, *(self._numbers[tensor] for tensor in self.results)})
        self.steps = [*steps]

    @property
    def feature_map_bytes(self) -> int:
        """Largest sum of values that live at once between operands and results; a view or an output written in place takes none."""
        most, live = 0, dict[int, int]()
        for step in self.steps:
            assert isinstance(step, GeStep)
            live |= step.taken_bytes()
            most = max(most, sum(live.values()))
            for number in step.dead:
                live.pop(number, None)
        return most

    def run(self, fed: Sequence[Sequence[torch.Tensor]], exchange: Exchange) -> list[list[torch.Tensor]]:
        """Runs one step.

        Args:
            fed: for each rank of this process the value of each of `data`; those that the graph writes in place are written.
            exchange: for operators that communicate.

        Returns:
            for each rank the values of `results`, some of which may lie in the memory of an operand or of each other.

        Raises:
            LoweringError: an operator has an input, an attribute or a value that is not implemented here, or a result differs from
                what the graph declares.
        """
        ranks = []
        for operands in fed:
            values = list(self._start)
            for op, operand in zip(self.data, operands, strict=True):
                values[self._numbers[f"{op.name}:0"]] = operand
            ranks.append(values)
        self.run_steps(ranks, exchange)
        return [self._outputs(values) for values in ranks]

    def _outputs(self, values: Values) -> list[torch.Tensor]:
        outputs = [_tensor(tensor, values[self._numbers[tensor]]) for tensor in self.results]
        for value, (tensor, declared) in zip(outputs, self.results.items(), strict=True):
            if not declared.endswith("[?]") and shape_of(value) != declared:
                raise LoweringError(f"NetOutput takes {tensor}, {shape_of(value)}; the graph says {declared}")
        return outputs

    def _unfolded(self, steps: list[GeStep]) -> list[GeStep]:
        """Computes what depends on constants alone, and returns the other steps."""
        written, rest, nobody = _written(steps), [], MeshExchange(Mesh())
        with torch.no_grad():
            for step in steps:
                known = all(i < 0 or self._start[i] is not None for i in step.inputs)
                if not known or step.group or step.writes or step.op.after or not written.isdisjoint(step.outputs):
                    rest.append(step)
                    continue
                self.run_step(step, [self._start], nobody)
                values = [self._start[i] for i in step.outputs]
                if any(isinstance(value, torch.Tensor) and value.nbytes > _FOLDED_BYTES for value in values):
                    for i in step.outputs:
                        self._start[i] = None
                    rest.append(step)
        self._keep_read(rest)
        return rest

    def _keep_read(self, steps: list[GeStep]) -> None:
        """Drops known values that no step reads, and keeps the integers of the others, which steps ask for as lists."""
        read = {i for step in steps for i in step.inputs} | {self._numbers[tensor] for tensor in self.results}
        self._start = [shared(value) if i in read else None for i, value in enumerate(self._start)]
        for step in steps:
            for slot, i in zip(step.op.slots, step.inputs, strict=True):
                value = self._start[i] if i >= 0 else None
                if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.numel() <= _LISTED:
                    step.op.constants[slot] = value.flatten().tolist()


def shared(value: Value | None) -> Value | None:
    """The value, or one that is equal and kept already; for values that nobody writes."""
    if not isinstance(value, torch.Tensor) or value.nbytes < _SHARED_BYTES:
        return value
    value = value.contiguous()
    data = ctypes.string_at(value.data_ptr(), value.nbytes)
    return _shared.setdefault((value.dtype, value.shape, hashlib.blake2b(data, digest_size=16).digest()), value)


def _outputs(op: GeOp) -> list[str]:
    return [f"{op.name}:{port}" for port in range(len(op.results))]


def parsed_shape(text: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and sizes written as `bf16[16,2]`; None where the text says less."""
    match = re.fullmatch(r"(\w+)\[((\d+(,\d+)*)?)\]", text)
    if match is None or match[1] not in DTYPES:
        return None
    return DTYPES[match[1]], tuple(int(size) for size in match[2].split(",") if size)


def _written(steps: list[GeStep]) -> set[int]:
    """Tensors in whose memory an operator writes."""
    written: set[int] = set()
    for step in reversed(steps):
        written |= {step.inputs[position] for position in step.writes.values() if position < len(step.inputs)}
        if step.view and not written.isdisjoint(step.outputs):
            written.add(step.inputs[0])
    return written


def _check_known(ops: list[GeOp]) -> None:
    known = {*FUNCTIONS, *GROUP_FUNCTIONS, *BORDER}
    for op in ops:
        if op.type not in known:
            raise LoweringError(f"{op} is of a type that the interpreter does not know; it knows {', '.join(sorted(known))}")


def _results(ops: Sequence[Any]) -> dict[str, str]:
    net_outputs = [op for op in ops if op.type == "NetOutput"]
    tensors = [[tensor for tensor in op.input if not tensor.endswith(":-1")] for op in net_outputs]
    if len(net_outputs) != 1 or len(set(tensors[0])) != len(tensors[0]):
        counts = [len(names) for names in tensors]
        raise LoweringError(f"NetOutput has {counts} inputs; legal is one NetOutput whose inputs are all different")
    return dict(zip(tensors[0], map(shape, net_outputs[0].input_desc), strict=True))


def _constant(op: GeOp) -> torch.Tensor:
    call = Call(op, [])
    value = call.attr("value")
    call.finish()
    tensor = _tensor(f"{op.name}:0", value)
    if op.results[0] and shape_of(tensor) != op.results[0]:
        raise LoweringError(f"output 0 of {op} is {shape_of(tensor)}; the graph says {op.results[0]}")
    return tensor


def _in_order(ops: list[GeOp], order: str) -> list[GeOp]:
    """An order in which operators may run: always, of those that are ready, the one listed last; or, where each stream runs in the order of
    the file, the next of a side stream (`sides-first`) or of the main one (`sides-last`)."""
    position = {op.name: i for i, op in enumerate(ops)}
    before = [{name for name in (*(tensor.rpartition(":")[0] for tensor in op.inputs), *op.after) if name in position} for op in ops]
    if order == "reversed-ready":
        urgency = [(0, -i) for i in range(len(ops))]
    else:
        urgency = [(int((op.stream == "") == (order == "sides-first")), i) for i, op in enumerate(ops)]
        last: dict[str, str] = {}
        for op, waits in zip(ops, before, strict=True):
            waits.update([last[op.stream]] if op.stream in last else [])
            last[op.stream] = op.name
    readers: dict[str, list[int]] = {op.name: [] for op in ops}
    for i, names in enumerate(before):
        for name in names:
            readers[name].append(i)
    missing = [len(names) for names in before]
    ready = [(urgency[i], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        ordered.append(ops[heapq.heappop(ready)[1]])
        for i in readers[ordered[-1].name]:
            missing[i] -= 1
            if not missing[i]:
                heapq.heappush(ready, (urgency[i], i))
    return ordered


def _check_result(op: GeOp, port: int, value: torch.Tensor) -> None:
    if not (declared := op.results[port]):
        return
    actual = shape_of(value)
    # Fused operators without a float32 form on the device declare bfloat16; their CPU kernels return float32 for float32.
    widens = op.type in BY_TYPE and BY_TYPE[op.type].widens
    widened = widens and actual.startswith("f32") and declared == f"b{actual}".replace("bf32", "bf16", 1)
    if actual != declared and not widened:
        raise LoweringError(f"output {port} of {op} is {actual}; the graph says {declared}")


def _memory(value: Value) -> int:
    return (value if isinstance(value, torch.Tensor) else value.packed).untyped_storage().data_ptr()


def _tensor(name: str, value: Value | None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"{name} is {type(value).__name__}; legal is a tensor of one of torch's types")
    return value
