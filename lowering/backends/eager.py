"""The reference backend: runs a graph node by node. Others are compared with it, and buckets that are not compiled yet run on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from ...graphs import ops as ops
from ...graphs import products
from ...graphs.errors import LoweringError
from .. import isa
from ..artifact.graph_io import decode, encode
from ..backend import Backend, CompiledFile
from ..platform import CPU, Platform

if TYPE_CHECKING:
    from ...graphs.spmd.partition import PartitionedProgram
    from ..lower import LoweredProgram


class EagerExecutable:
    """Runs a graph of aten operators and primitives on CPU tensors, freeing each value after its last reader.

    Args:
        graph: a `LoweredProgram.graph` for this backend.

    Raises:
        LoweringError: when the graph reads something that is not an operand.
    """

    backend = "eager"

    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        slot = {node: i for i, node in enumerate(nodes)}
        last = {source: node for node in nodes for source in node.all_input_nodes}
        self._operands = [slot[n] for n in nodes if n.op == "placeholder"]
        self._size = len(nodes)
        # oneDNN multiplies bfloat16 from AVX-512 on; torch's own loops take 4 to 6 times as long as float32.
        self._widened = isa.in_use() is not None and not isa.has("avx512")
        self._steps: list[tuple[int, Callable[..., Any], Any, Any, list[int]]] = []
        self._results: list[int] = []
        for node in nodes:
            if node.op == "call_function":
                # Nothing reads the result of an update in place, so its own node frees it.
                dead = [slot[s] for s in node.all_input_nodes if last[s] is node and s.op != "placeholder"]
                free = dead + ([] if node in last else [slot[node]])
                self._steps.append((slot[node], node.target, _bind(node.args, slot), _bind(node.kwargs, slot), free))
            elif node.op == "output":
                self._results = [slot[n] for n in node.args[0]]
            elif node.op != "placeholder":
                raise LoweringError(f"{node.name} is a {node.op} of {node.target!r}; everything a graph reads must be an operand")

    def prepare(self, params: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Derives nothing: it reads parameters as they are stored."""
        return ()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs one step; state operands are updated in place, the outputs are returned.

        Raises:
            LoweringError: when the number of operands differs from the graph's.
        """
        if len(operands) != len(self._operands):
            raise LoweringError(f"{len(operands)} operands, the graph has {len(self._operands)}")
        values: list[Any] = [None] * self._size
        for at, operand in zip(self._operands, operands, strict=True):
            values[at] = operand
        with torch.inference_mode(), products.widened(self._widened):
            for at, target, args, kwargs, free in self._steps:
                values[at] = target(*_fill(args, values), **_fill(kwargs, values))
                for dead in free:
                    values[dead] = None
        return [values[i] for i in self._results]


class _Ref(int):
    """Index of a node's value in the list of values."""


def _bind(value: Any, slot: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return _Ref(slot[value])
    if isinstance(value, (list, tuple)):
        return [_bind(v, slot) for v in value] if isinstance(value, list) else tuple(_bind(v, slot) for v in value)
    if isinstance(value, dict):
        return {k: _bind(v, slot) for k, v in value.items()}
    return value


def _fill(value: Any, values: list[Any]) -> Any:
    kind = type(value)
    if kind is _Ref:
        return values[value]
    if kind is tuple:
        return tuple([_fill(v, values) for v in value])
    if kind is list:
        return [_fill(v, values) for v in value]
    if kind is dict:
        return {k: _fill(v, values) for k, v in value.items()}
    return value


class Eager(Backend):
    """Runs lowered graphs node by node, on any machine that torch runs on."""

    name = "eager"
    suffix = "graph"

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        """Primitives stay whole; those that update a pool write it in place."""
        # Not at the top: it brings DTensor along, most of a second that serving has no use for.
        from ..lower import lower_eager

        return lower_eager(partitioned)

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> CompiledFile:
        """The graph itself, serialised: there is nothing to compile."""
        return CompiledFile(encode(lowered.graph))

    def open(self, path: Path) -> EagerExecutable:
        """Reads a graph back.

        Raises:
            LoweringError: when the file is not a serialised graph.
        """
        try:
            return EagerExecutable(decode(path.read_bytes()))
        except OSError as error:
            raise LoweringError(f"{path}: {error}") from None


BACKEND = Eager()
