"""Turns a serialised GE graph and a mesh into a run of all its ranks in this process: what is run is the file that would be shipped."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ..convert import shape_of
from ..ge_file import GeFile, parse
from ..inspect_ge import IN_PLACE, VIEWS, follow_memory, shape
from .ge_ops_common import Call, Function, GeOp, Results, Value, read
from .ge_ops_fused import FUSED
from .ge_ops_group import TOGETHER, group_of
from .ge_ops_math import MATH
from .ge_ops_shape import SHAPE

FUNCTIONS: Mapping[str, Function] = {**MATH, **SHAPE, **FUSED}
"""What operators give on one rank, by type."""
ORDERS = ("file", "reversed-ready")
_BORDER = ("Data", "Const", "NetOutput")
_ASSIGN = {"Assign": {0: 0}}

Known = dict[str, Value]
"""What one rank knows: a value by `name:port`."""


class GeInterpreter:
    """Runs the graph of a GE file on CPU tensors for every rank of a mesh; a collective is one call over the values of its group.

    It does what GE does: operators that write in place write the tensor that they take, views share memory with what they view,
    everything else gets memory of its own. Each result is compared with the type and the sizes that the graph says it has.

    Args:
        ge_file: of all ranks, not patched: groups are named "tp", "dp" and "world".
        mesh: the axes `dp` and `tp`.
        order: "file" runs operators as they are listed; "reversed-ready" runs, of those that wait for nothing, the one listed last.
            GE promises no more than that data and control edges are kept, so every order must give the same.

    Raises:
        LoweringError: the graph has an operator that is not known or reads what no operator gives, or it contradicts its GE file.
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
        """Runs one step: operands in the order of the program's signature, state is updated in the rank's own operand.

        Ranks must not share a tensor that the graph writes.

        Returns:
            for each rank the graph's results.

        Raises:
            LoweringError: operands are of another number, shape or dtype than the graph says, an operator has an input, an attribute
                or a value that the interpreter gives no meaning, a result is not what the graph says, or the members of a group
                disagree.
        """
        if len(operands_per_rank) != self._size:
            raise LoweringError(f"operands of {len(operands_per_rank)} ranks, the mesh has {self._size}")
        with torch.no_grad():
            ranks = [self._fed(rank, operands) for rank, operands in enumerate(operands_per_rank)]
            for op in self._ops:
                self._step(op, ranks)
                for known in ranks:
                    for gone in self._dead[op.name]:
                        known.pop(gone, None)
            return [self._finish(known, operands) for known, operands in zip(ranks, operands_per_rank, strict=True)]

    def _fed(self, rank: int, operands: Sequence[torch.Tensor]) -> Known:
        if len(operands) != self._ge_file.inputs:
            raise LoweringError(f"rank {rank} has {len(operands)} operands, the graph takes {self._ge_file.inputs}")
        known: Known = dict(self._constants)
        for op in self._data:
            operand = operands[self._ge_file.data[op.attrs["index"]]]
            if op.results[0] and shape_of(operand) != op.results[0]:
                raise LoweringError(f"rank {rank} feeds {op.name} with {shape_of(operand)}; the graph takes {op.results[0]}")
            known[f"{op.name}:0"] = operand
        return known

    def _step(self, op: GeOp, ranks: list[Known]) -> None:
        calls = [Call(op, [known[tensor] if tensor else None for tensor in op.inputs]) for known in ranks]
        for call, results, known in zip(calls, self._run(op, calls), ranks, strict=True):
            call.finish()
            values = results if isinstance(results, tuple) else (results,)
            if len(values) != len(op.results):
                raise LoweringError(f"{op} gives {len(values)} values, the graph says {len(op.results)}")
            for port, value in enumerate(values):
                known[f"{op.name}:{port}"] = _placed(call, port, value)

    def _run(self, op: GeOp, calls: list[Call]) -> Sequence[Results]:
        if op.type not in TOGETHER:
            function = FUNCTIONS[op.type]
            return [function(call) for call in calls]
        (name,) = {group_of(call) for call in calls}
        if name not in self._groups:
            raise LoweringError(f"{op} talks over group {name!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Results] = {}
        for members in self._groups[name]:
            _check_agreement(op, members, calls)
            results.update(zip(members, TOGETHER[op.type]([calls[rank] for rank in members]), strict=True))
        return [results[rank] for rank in range(self._size)]

    def _finish(self, known: Known, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Writes donated outputs home, and gives the others."""
        values = [_tensor(tensor, known[tensor]) for tensor in self._results]
        for value, (tensor, said) in zip(values, self._results.items(), strict=True):
            if not said.endswith("[?]") and shape_of(value) != said:
                raise LoweringError(f"NetOutput takes {tensor}, {shape_of(value)}; the graph says {said}")
        homes = [(operands[operand], values[output]) for output, operand in self._ge_file.donations]
        # Copies first: one value may be a view of another's home, and a result must not change with a later step.
        results = [value.clone() for value in values[: self._ge_file.outputs]]
        for home, value in [(home, value.clone()) for home, value in homes if value is not home]:
            home.copy_(value)
        return results


def _check_known(ops: list[GeOp]) -> None:
    known = {*FUNCTIONS, *TOGETHER, *_BORDER}
    for op in ops:
        if op.type not in known:
            raise LoweringError(f"{op} is of a type that the interpreter does not know; it knows {', '.join(sorted(known))}")


def _waits(ops: list[GeOp]) -> dict[str, set[str]]:
    """Operators that each one reads or waits for; all must be listed before it."""
    waits: dict[str, set[str]] = {}
    ports = {"": 1}
    for op in ops:
        if op.name in waits:
            raise LoweringError(f"two operators are called {op.name}")
        for tensor in op.inputs:
            name, _, port = tensor.rpartition(":")
            if tensor and not int(port) < ports.get(name, 0):
                raise LoweringError(f"{op} reads {tensor}, which no operator before it gives")
        if strange := [name for name in op.after if name not in waits]:
            raise LoweringError(f"{op} waits for {', '.join(strange)}, which no operator before it is called")
        waits[op.name] = {*(tensor.rpartition(":")[0] for tensor in op.inputs if tensor), *op.after}
        ports[op.name] = len(op.results)
    return waits


def _check_writes(messages: Sequence[Any], ge_file: GeFile) -> None:
    """The operands that operators write must be those that the GE file says they write; constants are nobody's to write."""
    memory = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in messages if op.type == "Data"}
    constants = [f"{op.name}:0" for op in messages if op.type == "Const"]
    memory |= {tensor: ge_file.inputs + i for i, tensor in enumerate(constants)}
    flow = follow_memory([_bare(op) for op in messages if op.type not in _BORDER], memory)
    written = {
        *flow.writers,
        *(flow.operand[op.input[0]] for op in map(_bare, messages) if op.type == "Assign" and op.input[0] in flow.operand),
    }
    breaches = [f"an operator writes the constant {constants[i - ge_file.inputs]}" for i in sorted(written) if i >= ge_file.inputs]
    donated = {operand for _, operand in ge_file.donations}
    if written - donated != set(ge_file.bound) - donated:
        held = f"{sorted(ge_file.bound)} bound and {sorted(donated)} donated"
        breaches.append(f"operators write operands {sorted(written)}, the GE file has {held}")
    if breaches := [*flow.breaches, *breaches]:
        raise LoweringError("; ".join(breaches))


def _bare(op: Any) -> Any:
    """The operator without control edges, which may stand before its inputs and are not counted where those have numbers."""
    if not any(tensor.endswith(":-1") for tensor in op.input):
        return op
    bare = type(op)()
    bare.CopyFrom(op)
    bare.input[:] = [tensor for tensor in op.input if not tensor.endswith(":-1")]
    return bare


def _results(ops: Sequence[Any], ge_file: GeFile) -> dict[str, str]:
    """Tensors of the results, then of the donations, and what the graph says each one is."""
    found = [op for op in ops if op.type == "NetOutput"]
    wanted = ge_file.outputs + len(ge_file.donations)
    tensors = [[tensor for tensor in op.input if not tensor.endswith(":-1")] for op in found]
    if [len(set(one)) for one in tensors] != [wanted] or len(tensors[0]) != wanted:
        raise LoweringError(f"NetOutput has {[len(one) for one in tensors]} inputs; legal is one with {wanted} of them, all different")
    return dict(zip(tensors[0], map(shape, found[0].input_desc), strict=True))


def _constant(op: GeOp) -> Value:
    call = Call(op, [])
    value = call.attr("value")
    call.finish()
    return _placed(call, 0, value)


def _latest_first(ops: list[GeOp], waits: Mapping[str, set[str]]) -> list[GeOp]:
    """The order that takes, of the operators whose predecessors have run, always the one listed last."""
    place = {op.name: i for i, op in enumerate(ops)}
    left = {op.name: sum(name in place for name in waits[op.name]) for op in ops}
    readers: dict[str, list[str]] = {op.name: [] for op in ops}
    for op in ops:
        for name in waits[op.name] & place.keys():
            readers[name].append(op.name)
    ready = [-place[name] for name, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(ops[-heapq.heappop(ready)])
        for name in readers[order[-1].name]:
            left[name] -= 1
            if not left[name]:
                heapq.heappush(ready, -place[name])
    return order


def _last_uses(ops: list[GeOp], kept: set[str]) -> dict[str, list[str]]:
    """The tensors that nobody reads after each operator."""
    last = {f"{op.name}:{port}": op.name for op in ops for port in range(len(op.results))}
    last |= {tensor: op.name for op in ops for tensor in op.inputs}
    dead: dict[str, list[str]] = {op.name: [] for op in ops}
    for tensor, name in last.items():
        if tensor not in kept:
            dead[name].append(tensor)
    return dead


def _placed(call: Call, port: int, value: Value) -> Value:
    """A value in the memory that GE gives it."""
    op = call.op
    if isinstance(value, torch.Tensor):
        _check_result(op, port, shape_of(value))
        written = (IN_PLACE | _ASSIGN).get(op.type, {}).get(port)
        if written is not None:
            home = _tensor(op.inputs[written], call.values[written])
            return home.copy_(value)
        if op.type in VIEWS:
            return value.contiguous()
        mine = {_memory(given) for given in call.values if given is not None}
        return value.clone(memory_format=torch.contiguous_format) if _memory(value) in mine else value.contiguous()
    return value


def _check_result(op: GeOp, port: int, found: str) -> None:
    said = op.results[port]
    # A fused operator that has no float32 form on a device says bfloat16; its CPU kernel keeps what it is given.
    kept = op.type in FUSED and found.startswith("f32") and said == f"b{found}".replace("bf32", "bf16", 1)
    if said and found != said and not kept:
        raise LoweringError(f"output {port} of {op} is {found}; the graph says {said}")


def _memory(value: Value) -> int:
    return (value if isinstance(value, torch.Tensor) else value.packed).untyped_storage().data_ptr()


def _tensor(name: str, value: Value | None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"{name} is {type(value).__name__}; legal is a tensor of one of torch's types")
    return value


def _check_agreement(op: GeOp, members: Sequence[int], calls: Sequence[Call]) -> None:
    def brought(rank: int) -> list[str]:
        return [shape_of(value) for value in calls[rank].values if isinstance(value, torch.Tensor)]

    first = brought(members[0])
    for rank in members[1:]:
        if (here := brought(rank)) != first:
            raise LoweringError(f"{op}: rank {members[0]} brings {first}, rank {rank} {here}; legal is the same")
