"""Runs one graph on CPU tensors for all ranks of a mesh in this process: lowered, captured, or of GE."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from .. import fold
from ..acl_graph.file import AclFile, graph_of
from ..convert import shape_of
from ..ge_file import GeFile
from .checks import declared_model
from .ge_program import ORDERS, GeProgram
from .program import Exchange, MeshExchange, Observe
from .torch_program import TorchProgram


class Interpreter:
    """Runs operators with their CPU kernels; a collective is one call over the values of its group.

    Nothing is captured: what a read back costs and forbids is emulated by the device (acl_engine.py).

    Args:
        graph: that all ranks share: torch operators, which may call bodies, or a file, which is not patched for a rank.
        mesh: of all ranks.
        order: "file" runs operators as they are listed; "reversed-ready" always runs, of the operators whose inputs are there, the one
            listed last; "sides-first" and "sides-last" run each stream in order, as early or as late as may be. GE guarantees no order
            beyond data and control edges, so all must give the same results; torch's operators run in the order of the file.

    Raises:
        LoweringError: the graph has an unknown operator or an input without a producer, or it contradicts its file.
    """

    def __init__(self, graph: GraphModule | AclFile | GeFile, mesh: Mesh, *, order: str = ORDERS[0]) -> None:
        self._size, self._exchange = mesh.size, MeshExchange(mesh)
        self._file = None if isinstance(graph, GraphModule) else graph
        self._program = _program(graph, order)

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]], observe: Observe | None = None) -> list[list[torch.Tensor]]:
        """Runs one step. State is updated in the operands of each rank; ranks must not share a tensor that the graph writes.

        Args:
            operands_per_rank: for each rank the operands, in the order of the program's signature; behind them the derived values,
                which are computed here where they are left out.
            observe: called before each operator with the call of rank 0.

        Returns:
            for each rank the graph's results.

        Raises:
            LoweringError: operands differ in number, shape or dtype from what the graph declares, an operator has an input, an
                attribute or a value that is not implemented here, a result differs from what the graph declares, or the members of a
                group bring tensors of different shapes or dtypes.
        """
        if len(operands_per_rank) != self._size:
            raise LoweringError(f"operands of {len(operands_per_rank)} ranks, the mesh has {self._size}")
        self._program.observe = observe
        return self._program.run([self._fed(rank, operands) for rank, operands in enumerate(operands_per_rank)], self._exchange)

    def _fed(self, rank: int, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A rank's operands with the derived values."""
        file, total = self._file, self._program.operands
        inputs = total if file is None else file.inputs
        if len(operands) not in (inputs, total):
            raise LoweringError(f"rank {rank} has {len(operands)} operands, the graph takes {inputs}")
        return operands if file is None or len(operands) == total else [*operands, *fold.evaluate(file, operands)]


class _GeFileProgram(GeProgram):
    """A GE graph that takes the operands of its file, and writes donated outputs into them."""

    def __init__(self, file: GeFile, order: str) -> None:
        super().__init__(declared_model(file), order=order)
        self.operands, self._file = file.operands, file

    def run(self, operands_per_rank: Sequence[Sequence[torch.Tensor]], exchange: Exchange) -> list[list[torch.Tensor]]:
        """Runs one step; returns the results of each rank."""
        outputs = super().run([self._fed(rank, operands) for rank, operands in enumerate(operands_per_rank)], exchange)
        return [_donated(self._file, values, operands) for values, operands in zip(outputs, operands_per_rank, strict=True)]

    def _fed(self, rank: int, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fed = []
        for op in self.data:
            operand = operands[self._file.data[op.attrs["index"]]]
            if op.results[0] and shape_of(operand) != op.results[0]:
                raise LoweringError(f"rank {rank} feeds {op.name} with {shape_of(operand)}; the graph takes {op.results[0]}")
            fed.append(operand)
        return fed


@functools.singledispatch
def _program(graph: GraphModule | AclFile | GeFile, order: str) -> TorchProgram | GeProgram:
    raise TypeError(f"{type(graph).__name__} is no graph that runs here")


_program.register(GeFile, _GeFileProgram)


@_program.register
def _of_torch(graph: GraphModule, order: str) -> TorchProgram:
    if order != ORDERS[0]:
        raise LoweringError(f"order is {order!r}; legal for operators of torch is {ORDERS[0]}")
    return TorchProgram(graph)


@_program.register
def _of_captured(graph: AclFile, order: str) -> TorchProgram:
    return _of_torch(graph_of(graph), order)


def _donated(ge_file: GeFile, outputs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Writes donated outputs into their operands and returns the results."""
    donated = [(operands[operand], outputs[output]) for output, operand in ge_file.donations]
    # Clone before writing: an output may be a view of another's operand, and results must not change with a later step.
    results = [value.clone() for value in outputs[: ge_file.outputs]]
    for operand, value in [(operand, value.clone()) for operand, value in donated if value is not operand]:
        operand.copy_(value)
    return results
