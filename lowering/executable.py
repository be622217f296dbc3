"""The protocol of an executable: a compiled graph that was opened, callable with flat operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..graphs.errors import LoweringError
from ..graphs.types import Aval, Signature


class Executable(Protocol):
    """One step of one bucket, ready to run.

    `executable(operands) -> outputs`: operands follow `Signature.operands`, results `Signature.outputs`; state operands are
    updated in place. Not to be called from two threads at once over the same state.
    """

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step."""


class HostExecutable(Executable, Protocol):
    """An executable on this machine's CPU, which reads parameters where they were loaded."""

    def prepare(self, params: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Derives from parameters, in the order of `Signature.params`, what it reads in place of some; returns the positions of these.

        Done once for a process, when parameters are loaded. A call with parameters that were not prepared does it first.
        """
        ...


def check_operands(operands: Sequence[torch.Tensor], signature: Signature) -> None:
    """Refuses operands that a compiled graph would misread, since it never checks shapes, dtypes or strides.

    Called once, when operands are bound to a graph, not at every step.

    Raises:
        LoweringError: naming the leaf, what it is and what it must be.
    """
    leaves = signature.operands
    if len(operands) != len(leaves):
        raise LoweringError(f"{len(operands)} operands, the graph has {len(leaves)}: {_names(signature)}")
    for operand, leaf in zip(operands, leaves, strict=True):
        if (tuple(operand.shape), operand.dtype) != (leaf.aval.shape, leaf.aval.dtype):
            raise LoweringError(f"operand {leaf.name} is {tuple(operand.shape)} {operand.dtype}, the graph needs {_plain(leaf.aval)}")
        if not operand.is_contiguous():
            raise LoweringError(f"operand {leaf.name} has strides {operand.stride()}; legal is contiguous")


def _plain(aval: Aval) -> str:
    return f"{aval.shape} {aval.dtype}"


def _names(signature: Signature) -> str:
    return f"{len(signature.params)} params, {len(signature.state)} state, {len(signature.inputs)} inputs"
