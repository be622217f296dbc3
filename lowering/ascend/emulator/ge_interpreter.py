"""Interprets the GE graph of an artifact on CPU tensors, for all ranks of a mesh in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ..convert import shape_of
from ..fold import evaluate
from ..ge_file import GROUPS, GeFile, parse
from ..inspect_ge import follow_memory
from ..operators.call import Call, GeOp, Results, group_of
from ..operators.table import GROUP_FUNCTIONS
from .ge_program import BORDER, GeProgram


class GeInterpreter:
    """Runs the graph of a GE file on CPU tensors for every rank of a mesh; a collective is one call over the values of its group.

    Memory behaves as `GeProgram` says.

    Args:
        ge_file: of all ranks, not patched: groups are named as in `ge_file.GROUPS`.
        mesh: the axes `dp` and `tp`.
        order: "file" runs operators as they are listed; "reversed-ready" always runs, of the operators whose inputs are there, the one
            listed last. GE guarantees no order beyond data and control edges, so both must give the same results.

    Raises:
        LoweringError: the graph has an unknown operator or an input without a producer, or it contradicts its GE file.
    """

    def __init__(self, ge_file: GeFile, mesh: Mesh, *, order: str = "file") -> None:
        self._program = GeProgram(check_declared(ge_file), order=order)
        self._ge_file, self._size, self._groups = ge_file, mesh.size, mesh.groups(GROUPS)

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
        fed = [self._fed(rank, operands) for rank, operands in enumerate(operands_per_rank)]
        outputs = self._program.run(fed, self._exchange)
        return [self._finish(values, operands) for values, operands in zip(outputs, operands_per_rank, strict=True)]

    def _fed(self, rank: int, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(operands) not in (self._ge_file.inputs, self._ge_file.operands):
            raise LoweringError(f"rank {rank} has {len(operands)} operands, the graph takes {self._ge_file.inputs}")
        if len(operands) < self._ge_file.operands:
            operands = [*operands, *evaluate(self._ge_file, operands)]
        fed = []
        for op in self._program.data:
            operand = operands[self._ge_file.data[op.attrs["index"]]]
            if op.results[0] and shape_of(operand) != op.results[0]:
                raise LoweringError(f"rank {rank} feeds {op.name} with {shape_of(operand)}; the graph takes {op.results[0]}")
            fed.append(operand)
        return fed

    def _exchange(self, op: GeOp, calls: list[Call]) -> Sequence[Results]:
        (name,) = {group_of(call) for call in calls}
        if name not in self._groups:
            raise LoweringError(f"{op} communicates over group {name!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Results] = {}
        for members in self._groups[name]:
            _check_agreement(op, members, calls)
            results.update(zip(members, GROUP_FUNCTIONS[op.type]([calls[rank] for rank in members]), strict=True))
        return [results[rank] for rank in range(self._size)]

    def _finish(self, outputs: list[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Writes donated outputs into their operands and returns the results."""
        donated = [(operands[operand], outputs[output]) for output, operand in self._ge_file.donations]
        # Clone before writing: an output may be a view of another's operand, and results must not change with a later step.
        results = [value.clone() for value in outputs[: self._ge_file.outputs]]
        for operand, value in [(operand, value.clone()) for operand, value in donated if value is not operand]:
            operand.copy_(value)
        return results


def check_declared(ge_file: GeFile) -> Any:
    """The graph of a GE file as a `ModelDef`, whose results and writes are what the file declares.

    Raises:
        LoweringError: operators write other operands than the file declares, or constants, or NetOutput has another number of inputs.
    """
    model = parse(ge_file.graph)
    if len(model.graph) == 1:
        _check_writes(model.graph[0].op, ge_file)
        _check_outputs(model.graph[0].op, ge_file)
    return model


def _check_writes(messages: Sequence[Any], ge_file: GeFile) -> None:
    """Refuses graphs whose operators write other operands than the GE file declares, or constants."""
    memory = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in messages if op.type == "Data"}
    constants = [f"{op.name}:0" for op in messages if op.type == "Const"]
    memory |= {tensor: ge_file.operands + i for i, tensor in enumerate(constants)}
    flow = follow_memory([_bare(op) for op in messages if op.type not in BORDER], memory)
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


def _check_outputs(messages: Sequence[Any], ge_file: GeFile) -> None:
    expected = ge_file.outputs + len(ge_file.donations)
    tensors = [[tensor for tensor in op.input if not tensor.endswith(":-1")] for op in messages if op.type == "NetOutput"]
    if [len(set(names)) for names in tensors] != [expected] or len(tensors[0]) != expected:
        counts = [len(names) for names in tensors]
        raise LoweringError(f"NetOutput has {counts} inputs; legal is one with {expected} of them, all different")


def _check_agreement(op: GeOp, members: Sequence[int], calls: Sequence[Call]) -> None:
    def shapes(rank: int) -> list[str]:
        return [shape_of(value) for value in calls[rank].values if isinstance(value, torch.Tensor)]

    first = shapes(members[0])
    for rank in members[1:]:
        if (other := shapes(rank)) != first:
            raise LoweringError(f"{op}: rank {members[0]} brings {first}, rank {rank} {other}; legal is the same")
