"""Runs an `.aclgraph` file on all ranks of a mesh in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ....graphs.types import Mesh
from ...artifact import graph_io
from .. import fold
from ..acl_graph.file import AclFile
from .emulator import RankEmulator

Observe = Callable[[Node, tuple[Any, ...], Mapping[str, Any]], None]


class _Observed(RankEmulator):
    observe: Observe | None = None

    def _step(self, graph: GraphModule, node: Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Sequence[Any]:
        if self.observe is not None:
            self.observe(node, *calls[0])
        return super()._step(graph, node, calls)


class AclInterpreter:
    """Runs the operators of a file in their order, with the CPU kernels of NPU operators; nothing is captured.

    Lists that the host would read stay tensors: what a read back costs and forbids is emulated by the device (acl_engine.py).

    Args:
        acl_file: of all ranks.
        mesh: of all ranks.
    """

    def __init__(self, acl_file: AclFile, mesh: Mesh) -> None:
        self._file = acl_file
        self._emulator = _Observed(graph_io.decode(acl_file.graph, _find), mesh)

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]], observe: Observe | None = None) -> list[list[torch.Tensor]]:
        """Runs one step; pools are written in the operands of each rank.

        Args:
            operands_per_rank: for each rank the operands of the program; values derived from them are computed here.
            observe: called before each operator with its node and the arguments of rank 0.

        Returns:
            for each rank the results.

        Raises:
            LoweringError: see `RankEmulator`.
        """
        self._emulator.observe = observe
        return self._emulator([[*operands, *fold.evaluate(self._file, operands)] for operands in operands_per_rank])


def _find(name: str) -> Callable[..., Any]:
    # Operators of NPUs need not be registered here.
    return graph_io.find_target(name) if name.startswith(("aten.", "operator.", "_c10d_functional.")) else graph_io.NamedOperator(name)
