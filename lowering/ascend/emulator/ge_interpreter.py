"""Interprets the GE graph of an artifact on CPU tensors, for all ranks of a mesh in this process."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ..convert import shape_of
from ..fold import evaluate
from ..ge_file import GeFile, parse
from ..inspect_ge import IN_PLACE, VIEWS, follow_memory, shape
from .ge_ops_common import Call, Function, GeOp, Results, Value, read
from .ge_ops_fused import FUSED
from .ge_ops_group import GROUP_FUNCTIONS, group_of
from .ge_ops_math import MATH
from .ge_ops_shape import SHAPE

FUNCTIONS: Mapping[str, Function] = {**MATH, **SHAPE, **FUSED}
"""Functions of operators that run on one rank alone, by type."""
ORDERS = ("file", "reversed-ready")
_BORDER = ("Data", "Const", "NetOutput")
_ASSIGN = {"Assign": {0: 0}}

Values = dict[str, Value]
"""Values of one rank, by `name:port`."""


class GeInterpreter:
    """Runs the graph of a GE file on CPU tensors for every rank of a mesh; a collective is one call over the values of its group.

    Memory behaves as in GE: operators that write in place write their input, views share memory with their input, everything else gets
    memory of its own. Each result must have the dtype and sizes that the graph declares.

    Args:
        ge_file: of all ranks, not patched: groups are named "tp", "dp" and "world".
        mesh: the axes `dp` and `tp`.
        order: "file" runs operators as they are listed; "reversed-ready" always runs, of the operators whose inputs are there, the one
            listed last. GE guarantees no order beyond data and control edges, so both must give the same results.

    Raises:
        LoweringError: the graph has an unknown operator or an input without a producer, or it contradicts its GE file.
    """

    def __init__(self, ge_file: GeFile, mesh: Mesh, *, order: str = "file") -> None:
        if order not in ORDERS:
            raise LoweringError(f"order is {order!r}; legal are {', '.join(ORDERS)}")
        model = parse(ge_file.graph)
        if len(model.graph) != 1:
            raise LoweringError(f"the model has {len(model.graph)} graphs; legal is one, without calls")
        ops = [read(op) for op in model.graph[0].op]
        _check_known(ops)
        waits = _waits(ops)
        _check_writes(model.graph[0].op, ge_file)
        self._ge_file, self._size, self._groups = ge_file, mesh.size, mesh.groups()
        self._data = [op for op in ops if op.type == "Data"]
        self._results = _results(model.graph[0].op, ge_file)
        self._constants = {f"{op.name}:0": _constant(op) for op in ops if op.type == "Const"}
        inner = [op for op in ops if op.type not in _BORDER]
        self._ops = inner if order == "file" else _latest_first(inner, waits)
        self._dead = _last_uses(self._ops, {*self._results, *self._constants})

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Runs one step. State is updated in the operands of each rank; ranks must not share a tensor that the graph writes.

        Args:
            operands_per_rank: for each rank the operands, in the order of the program's signature; behind them the derived values,
                which are computed here where they are left out.

        Returns:
            for each rank the graph's results.

        Raises:
            LoweringError: operands differ in number, shape or dtype from what the graph declares, an operator has an input, an
                attribute or a value that is not implemented here, a result differs from what the graph declares, or the members of a
                group bring tensors of different shapes or dtypes.
        """
        if len(operands_per_rank) != self._size:
            raise LoweringError(f"operands of {len(operands_per_rank)} ranks, the mesh has {self._size}")
        with torch.no_grad():
            ranks = [self._fed(rank, operands) for rank, operands in enumerate(operands_per_rank)]
            for op in self._ops:
                self._step(op, ranks)
                for values in ranks:
                    for unused in self._dead[op.name]:
                        values.pop(unused, None)
            return [self._finish(values, operands) for values, operands in zip(ranks, operands_per_rank, strict=True)]

    def _fed(self, rank: int, operands: Sequence[torch.Tensor]) -> Values:
        if len(operands) not in (self._ge_file.inputs, self._ge_file.operands):
            raise LoweringError(f"rank {rank} has {len(operands)} operands, the graph takes {self._ge_file.inputs}")
        if len(operands) < self._ge_file.operands:
            operands = [*operands, *evaluate(self._ge_file, operands)]
        values: Values = dict(self._constants)
        for op in self._data:
            operand = operands[self._ge_file.data[op.attrs["index"]]]
            if op.results[0] and shape_of(operand) != op.results[0]:
                raise LoweringError(f"rank {rank} feeds {op.name} with {shape_of(operand)}; the graph takes {op.results[0]}")
            values[f"{op.name}:0"] = operand
        return values

    def _step(self, op: GeOp, ranks: list[Values]) -> None:
        calls = [Call(op, [values[tensor] if tensor else None for tensor in op.inputs]) for values in ranks]
        for call, result, values in zip(calls, self._run(op, calls), ranks, strict=True):
            call.finish()
            results = result if isinstance(result, tuple) else (result,)
            if len(results) != len(op.results):
                raise LoweringError(f"{op} gives {len(results)} values, the graph says {len(op.results)}")
            for port, value in enumerate(results):
                values[f"{op.name}:{port}"] = _in_memory(call, port, value)

    def _run(self, op: GeOp, calls: list[Call]) -> Sequence[Results]:
        if op.type not in GROUP_FUNCTIONS:
            function = FUNCTIONS[op.type]
            return [function(call) for call in calls]
        (name,) = {group_of(call) for call in calls}
        if name not in self._groups:
            raise LoweringError(f"{op} communicates over group {name!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Results] = {}
        for members in self._groups[name]:
            _check_agreement(op, members, calls)
            results.update(zip(members, GROUP_FUNCTIONS[op.type]([calls[rank] for rank in members]), strict=True))
        return [results[rank] for rank in range(self._size)]

    def _finish(self, values: Values, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Writes donated outputs into their operands and returns the results."""
        outputs = [_tensor(tensor, values[tensor]) for tensor in self._results]
        for value, (tensor, declared) in zip(outputs, self._results.items(), strict=True):
            if not declared.endswith("[?]") and shape_of(value) != declared:
                raise LoweringError(f"NetOutput takes {tensor}, {shape_of(value)}; the graph says {declared}")
        donated = [(operands[operand], outputs[output]) for output, operand in self._ge_file.donations]
        # Clone before writing: an output may be a view of another's operand, and results must not change with a later step.
        results = [value.clone() for value in outputs[: self._ge_file.outputs]]
        for operand, value in [(operand, value.clone()) for operand, value in donated if value is not operand]:
            operand.copy_(value)
        return results


def _check_known(ops: list[GeOp]) -> None:
    known = {*FUNCTIONS, *GROUP_FUNCTIONS, *_BORDER}
    for op in ops:
        if op.type not in known:
            raise LoweringError(f"{op} is of a type that the interpreter does not know; it knows {', '.join(sorted(known))}")


def _waits(ops: list[GeOp]) -> dict[str, set[str]]:
    """Operators that each operator reads or waits for; all must be listed before it."""
    waits: dict[str, set[str]] = {}
    ports = {"": 1}
    for op in ops:
        if op.name in waits:
            raise LoweringError(f"two operators are called {op.name}")
        for tensor in op.inputs:
            name, _, port = tensor.rpartition(":")
            if tensor and not int(port) < ports.get(name, 0):
                raise LoweringError(f"{op} reads {tensor}, which no operator before it gives")
        if unknown := [name for name in op.after if name not in waits]:
            raise LoweringError(f"{op} waits for {', '.join(unknown)}, which no operator before it is called")
        waits[op.name] = {*(tensor.rpartition(":")[0] for tensor in op.inputs if tensor), *op.after}
        ports[op.name] = len(op.results)
    return waits


def _check_writes(messages: Sequence[Any], ge_file: GeFile) -> None:
    """Refuses graphs whose operators write other operands than the GE file declares, or constants."""
    memory = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in messages if op.type == "Data"}
    constants = [f"{op.name}:0" for op in messages if op.type == "Const"]
    memory |= {tensor: ge_file.operands + i for i, tensor in enumerate(constants)}
    flow = follow_memory([_bare(op) for op in messages if op.type not in _BORDER], memory)
    written = {
        *flow.writers,
        *(flow.operand[op.input[0]] for op in map(_bare, messages) if op.type == "Assign" and op.input[0] in flow.operand),
    }
    breaches = [f"an operator writes the constant {constants[i - ge_file.operands]}" for i in sorted(written) if i >= ge_file.operands]
    donated = {operand for _, operand in ge_file.donations}
    if written - donated != set(ge_file.bound) - donated:
        declared = f"{sorted(ge_file.bound)} bound and {sorted(donated)} donated"
        breaches.append(f"operators write operands {sorted(written)}, the GE file has {declared}")
    if breaches := [*flow.breaches, *breaches]:
        raise LoweringError("; ".join(breaches))


def _bare(op: Any) -> Any:
    """The operator without control edges, which do not count as inputs where inputs are numbered."""
    if not any(tensor.endswith(":-1") for tensor in op.input):
        return op
    bare = type(op)()
    bare.CopyFrom(op)
    bare.input[:] = [tensor for tensor in op.input if not tensor.endswith(":-1")]
    return bare


def _results(ops: Sequence[Any], ge_file: GeFile) -> dict[str, str]:
    """Tensors of the results, then of the donations, with the dtype and sizes that the graph declares for each."""
    net_outputs = [op for op in ops if op.type == "NetOutput"]
    expected = ge_file.outputs + len(ge_file.donations)
    tensors = [[tensor for tensor in op.input if not tensor.endswith(":-1")] for op in net_outputs]
    if [len(set(names)) for names in tensors] != [expected] or len(tensors[0]) != expected:
        counts = [len(names) for names in tensors]
        raise LoweringError(f"NetOutput has {counts} inputs; legal is one with {expected} of them, all different")
    return dict(zip(tensors[0], map(shape, net_outputs[0].input_desc), strict=True))


def _constant(op: GeOp) -> Value:
    call = Call(op, [])
    value = call.attr("value")
    call.finish()
    return _in_memory(call, 0, value)


def _latest_first(ops: list[GeOp], waits: Mapping[str, set[str]]) -> list[GeOp]:
    """The topological order that always takes, of the operators that are ready, the one listed last."""
    position = {op.name: i for i, op in enumerate(ops)}
    missing = {op.name: sum(name in position for name in waits[op.name]) for op in ops}
    readers: dict[str, list[str]] = {op.name: [] for op in ops}
    for op in ops:
        for name in waits[op.name] & position.keys():
            readers[name].append(op.name)
    ready = [-position[name] for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(ops[-heapq.heappop(ready)])
        for name in readers[order[-1].name]:
            missing[name] -= 1
            if not missing[name]:
                heapq.heappush(ready, -position[name])
    return order


def _last_uses(ops: list[GeOp], live: set[str]) -> dict[str, list[str]]:
    """The tensors that nobody reads after each operator; those in `live` are never among them."""
    last = {f"{op.name}:{port}": op.name for op in ops for port in range(len(op.results))}
    last |= {tensor: op.name for op in ops for tensor in op.inputs}
    dead: dict[str, list[str]] = {op.name: [] for op in ops}
    for tensor, name in last.items():
        if tensor not in live:
            dead[name].append(tensor)
    return dead


def _in_memory(call: Call, port: int, value: Value) -> Value:
    """A result in the memory that GE gives it: that of the input which it overwrites or views, or its own."""
    op = call.op
    if isinstance(value, torch.Tensor):
        _check_result(op, port, shape_of(value))
        written = (IN_PLACE | _ASSIGN).get(op.type, {}).get(port)
        if written is not None:
            return _tensor(op.inputs[written], call.values[written]).copy_(value)
        if op.type in VIEWS:
            return value.contiguous()
        inputs = {_memory(operand) for operand in call.values if operand is not None}
        return value.clone(memory_format=torch.contiguous_format) if _memory(value) in inputs else value.contiguous()
    return value


def _check_result(op: GeOp, port: int, actual: str) -> None:
    declared = op.results[port]
    # Fused operators without a float32 form on the device declare bfloat16; their CPU kernels return float32 for float32.
    widened = op.type in FUSED and actual.startswith("f32") and declared == f"b{actual}".replace("bf32", "bf16", 1)
    if declared and actual != declared and not widened:
        raise LoweringError(f"output {port} of {op} is {actual}; the graph says {declared}")


def _memory(value: Value) -> int:
    return (value if isinstance(value, torch.Tensor) else value.packed).untyped_storage().data_ptr()


def _tensor(name: str, value: Value | None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"{name} is {type(value).__name__}; legal is a tensor of one of torch's types")
    return value


def _check_agreement(op: GeOp, members: Sequence[int], calls: Sequence[Call]) -> None:
    def shapes(rank: int) -> list[str]:
        return [shape_of(value) for value in calls[rank].values if isinstance(value, torch.Tensor)]

    first = shapes(members[0])
    for rank in members[1:]:
        if (other := shapes(rank)) != first:
            raise LoweringError(f"{op}: rank {members[0]} brings {first}, rank {rank} {other}; legal is the same")
