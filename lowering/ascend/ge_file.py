"""Turns a GE graph, its options and its bindings into the bytes of a `.ge` file, and back."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from ...graphs.errors import LoweringError
from .toolchain.stubs import wheel_path

FORMAT = "npucompile.ge/1"
RANK, GROUP = "ep_rank", "group"
"""Kinds of patches: the rank's number among all ranks, and the name of the communicator that a symbolic group stands for."""
GROUPS = ("tp", "dp", "world")


@dataclass(frozen=True)
class Container:
    """One graph for all ranks, as GE takes it.

    Results of the program are GE outputs 0 to `outputs` - 1, in order; what GE returns beyond them only carries donations.

    Attributes:
        graph: a serialised `ModelDef`; operators of `graph[0]` and of the graphs they call.
        options: compile options of this graph ("local" in torchair's words).
        donations: (GE output, operand) pairs: GE writes that output into that operand's memory.
        bound: operands that operators of the graph write in place; nothing is to be done for them at run time.
        inputs: number of operands.
        outputs: number of results.
        patches: (operator name, attribute name, kind) for what differs between ranks; a "group" attribute holds the
            symbolic name until then, one of `GROUPS`.
        feeds: operand of each `Data` op by its index, where conversion dropped operands nobody reads; None: all, in order.
        engine: options of the engine, equal for all graphs of one process ("global" in torchair's words).
    """

    graph: bytes
    options: Mapping[str, str]
    donations: tuple[tuple[int, int], ...]
    bound: tuple[int, ...]
    inputs: int
    outputs: int
    patches: tuple[tuple[str, str, str], ...]
    feeds: tuple[int, ...] | None = None
    engine: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> tuple[int, ...]:
        """Operand of each `Data` op, by its index."""
        return tuple(range(self.inputs)) if self.feeds is None else self.feeds


def encode(container: Container) -> bytes:
    """The same bytes for the same container, whatever order its mappings, and the maps of its graph, are in.

    Raises:
        LoweringError: the container contradicts itself, or the graph is not a `ModelDef`.
    """
    _check(container)
    return bytes(
        msgpack.packb(
            {
                "format": FORMAT,
                "graph": canonical(container.graph),
                "options": dict(sorted(container.options.items())),
                "engine": dict(sorted(container.engine.items())),
                "donations": sorted(container.donations),
                "bound": sorted(container.bound),
                "inputs": container.inputs,
                "outputs": container.outputs,
                "patches": sorted(container.patches),
                "feeds": container.feeds,
            }
        )
    )


def decode(data: bytes) -> Container:
    """Reads what `encode` wrote.

    Raises:
        LoweringError: the bytes are something else, or of another format.
    """
    try:
        read = msgpack.unpackb(data)
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            held = read.get("format") if isinstance(read, dict) else type(read).__name__
            raise LoweringError(f"this is not a GE container of format {FORMAT!r} but {held!r}; build the artifact again")
        container = Container(
            graph=read["graph"],
            options=read["options"],
            donations=tuple((output, operand) for output, operand in read["donations"]),
            bound=tuple(read["bound"]),
            inputs=read["inputs"],
            outputs=read["outputs"],
            patches=tuple((op, attribute, kind) for op, attribute, kind in read["patches"]),
            feeds=None if read["feeds"] is None else tuple(read["feeds"]),
            engine=read["engine"],
        )
    except (msgpack.UnpackException, ValueError, KeyError, TypeError) as error:
        raise LoweringError(f"this is not a GE container: {error!r}") from None
    _check(container)
    return container


def patched(container: Container, rank: int, groups: Mapping[str, str]) -> Container:
    """The container of one rank.

    Args:
        container: of all ranks; one that has been patched has no patches left.
        rank: number among all ranks.
        groups: communicator name by symbolic group; needed are those that the patches name.

    Raises:
        LoweringError: a patch names an operator, an attribute or a group that is not there.
    """
    if not container.patches:
        return container
    model = parse(container.graph)
    by_name: dict[str, list[Any]] = {}
    for op in operators(model):
        by_name.setdefault(op.name, []).append(op)
    for name, attribute, kind in container.patches:
        found = [op for op in by_name.get(name, ()) if attribute in op.attr]
        if not found:
            raise LoweringError(f"a patch is for attribute {attribute!r} of operator {name!r}, and the graph has no such operator")
        for op in found:
            if kind == RANK:
                op.attr[attribute].i = rank
            else:
                op.attr[attribute].s = _communicator(op.attr[attribute].s.decode(), f"{name}.{attribute}", groups).encode()
    return replace(container, graph=model.SerializeToString(deterministic=True), patches=())


def canonical(graph: bytes) -> bytes:
    """A `ModelDef` with its maps in order: protobuf writes them in any order, and another one each time.

    Raises:
        LoweringError: the bytes are not a `ModelDef`.
    """
    return bytes(parse(graph).SerializeToString(deterministic=True))


def parse(graph: bytes) -> Any:
    """The `ModelDef` message in `graph`.

    Raises:
        LoweringError: there is none, or it holds no graph.
    """
    model = messages().ModelDef()
    try:
        model.ParseFromString(graph)
    except importlib.import_module("google.protobuf.message").DecodeError as error:
        raise LoweringError(f"this is not a serialised GE model: {error}") from None
    if not model.graph:
        raise LoweringError(f"these {len(graph)} bytes are a GE model without a graph")
    return model


def operators(model: Any) -> Iterator[Any]:
    """Operators of all graphs of a model."""
    for graph in model.graph:
        yield from graph.op


@functools.cache
def messages() -> Any:
    """Protobuf classes of GE's messages, from the wheel; imports neither torch_npu nor torchair, and needs no stubs.

    Raises:
        LoweringError: there is no torch_npu.
    """
    path = wheel_path() / "dynamo" / "torchair" / "_ge_concrete_graph" / "ge_ir_by_protoc_3_19_pb2.py"
    spec = importlib.util.spec_from_file_location("npucompile_ge_ir_pb2", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise LoweringError(f"torch_npu has no {path}: it is of another version than this npucompile was written for")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _communicator(symbol: str, where: str, groups: Mapping[str, str]) -> str:
    if symbol not in groups:
        raise LoweringError(f"{where} is for group {symbol!r}, and this rank has {', '.join(sorted(groups)) or 'no group'}")
    return groups[symbol]


def _check(container: Container) -> None:
    feeds = container.data
    if [one for one in feeds if not 0 <= one < container.inputs] or len(set(feeds)) != len(feeds):
        raise LoweringError(f"a container of {container.inputs} operands feeds {feeds}; legal is each of them at most once")
    for what, operands in (("donates", [operand for _, operand in container.donations]), ("writes in place", list(container.bound))):
        if unfed := sorted(set(operands) - set(feeds)):
            raise LoweringError(f"a container {what} operands {unfed}, which its graph does not take; it takes {feeds}")
    for name, attribute, kind in container.patches:
        if kind not in (RANK, GROUP):
            raise LoweringError(f"a patch of {name}.{attribute} is of kind {kind!r}; legal are {RANK!r} and {GROUP!r}")
