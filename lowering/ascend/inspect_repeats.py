"""Finds operators of a GE graph that compute what another one has computed: a step would pay for them twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ...graphs.errors import LoweringError
from .ge_file import GeFile
from .ge_operators import Operator, Vertex, by_kind, by_structure, read
from .operators.table import COMMUNICATING, VIEWS

# Attributes that name a place in the graph, not a computation.
_NAMES = ("_readable_value", "_fx_tensor_name")


def repeated(ge_file: GeFile) -> dict[str, str]:
    """Operators whose type, attributes, inputs and results equal those of an earlier one, with the earlier one's name.

    Not counted are views, which are no kernels; operators that read constants alone, which GE computes when it compiles the graph; and
    those that exchange data between ranks. An operator that writes in place gives a new value, so that reads before and after it differ.

    Raises:
        LoweringError: the graph is no GE model.
    """
    ops, described = read(ge_file.graph), _described()
    return _repeated(ops, tuple([-1 if op.type == "Data" else described(op) for op in ops]))


@by_structure
def _repeated(ops: Sequence[Vertex], described: Sequence[int]) -> dict[str, str]:
    numbers: dict[str, Hashable] = {}
    first: dict[Hashable, tuple[str, int]] = {}
    constant, repeats = set[str](), dict[str, str]()
    for op, computed in zip(ops, described, strict=True):
        # Two calls of what exchanges data between ranks are two exchanges.
        if op.type in ("Data", "NetOutput") or op.type in COMMUNICATING:
            numbers[op.name] = op.name
            continue
        if constant.issuperset(op.producers):
            constant.add(op.name)
        earlier, number = first.setdefault((computed, _inputs(op, numbers)), (op.name, len(first)))
        numbers[op.name] = number
        if earlier != op.name and op.name not in constant and op.type not in VIEWS:
            repeats[op.name] = earlier
    return repeats


def check_unrepeated(ge_file: GeFile) -> None:
    """Proves that no step computes a value twice.

    Raises:
        LoweringError: naming operators that do.
    """
    if repeats := repeated(ge_file):
        names = ", ".join(f"{name} as {earlier}" for name, earlier in list(repeats.items())[:8]) + (", ..." if len(repeats) > 8 else "")
        raise LoweringError(
            f"{len(repeats)} operators compute what others have computed: {names}; legal is each value once in a step. share.py merges "
            "nodes of lowered bodies; what a converter adds to each of several nodes, such as a cast, must be written in the lowering"
        )


def _described() -> Callable[[Operator], int]:
    """Numbers what operators compute, but for their inputs."""
    numbers: dict[Hashable, int] = {}

    def number(op: Operator) -> int:
        attributes = tuple((key, op.attr[key].SerializeToString(deterministic=True)) for key in sorted(op.attr) if key not in _NAMES)
        return numbers.setdefault((op.type, attributes, _results(op.output_desc)), len(numbers))

    return by_kind(number)


def _inputs(op: Vertex, numbers: dict[str, Hashable]) -> Hashable:
    return tuple([_value(tensor, numbers) for tensor in op.input])


def _value(tensor: str, numbers: dict[str, Hashable]) -> Hashable:
    name, _, port = tensor.rpartition(":")
    return (numbers[name], port) if tensor else None


def _results(descs: Sequence[Any]) -> Hashable:
    return tuple((desc.dtype, tuple(desc.shape.dim), desc.layout) for desc in descs)
