"""The `.ge` file: a GE graph with its options, donations and per-rank patches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgpack
import torch

from ...graphs.errors import LoweringError
from ...graphs.types import AXIS, DISPATCH, FUSED_EXPERTS, WORLD
from .packed import fields_of
from .toolchain.stubs import wheel_path

FORMAT = "npucompile.ge/2"
STREAM, PRIORITY = "_user_stream_label", "_user_stream_priority"
"""Attributes of an operator: the label of its stream, and its priority there."""
FETCH = "Cmo"
"""Operator that fetches into the cache, on a stream of GE's own."""
RANK, GROUP = "ep_rank", "group"
"""Kinds of patches: the rank's number among all ranks, and the name of the rank's communicator for a symbolic group."""
GROUPS = ("tp", "dp", WORLD, DISPATCH, FUSED_EXPERTS)
"""Symbols of groups that a graph may name. "dispatch" has the ranks of "world" and a communicator of its own: expert dispatch and combine
allow no other operator in theirs (aclnnMoeDistributeDispatchV2, constraints)."""
LEGAL_GROUPS = f"{', '.join(GROUPS)}, and {AXIS}NAME"
GE_DTYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("DT_FLOAT", 0),
    torch.float16: ("DT_FLOAT16", 1),
    torch.bfloat16: ("DT_BF16", 27),
    torch.int8: ("DT_INT8", 2),
    torch.uint8: ("DT_UINT8", 4),
    torch.int32: ("DT_INT32", 3),
    torch.int64: ("DT_INT64", 9),
    torch.uint64: ("DT_UINT64", 10),
    torch.bool: ("DT_BOOL", 12),
}
"""Name of a dtype in GE's protobuf messages, and its number in GE's own enumeration, which differs from the message's."""


def is_symbol(group: object) -> bool:
    """Whether a graph may name a group so: one of `GROUPS`, or that along an axis of a function's mesh."""
    return isinstance(group, str) and (group in GROUPS or group.startswith(AXIS))


@dataclass(frozen=True)
class Folded:
    """What is computed of a rank's parameters once, when they are loaded (fold.py): functional, and without collectives.

    Attributes:
        graph: a flat graph of aten operators (artifact/graph_io.py): parameters -> derived values, each contiguous.
        params: operand of each of its placeholders.
        values: number of derived values.
    """

    graph: bytes
    params: tuple[int, ...]
    values: int


@dataclass(frozen=True)
class GeFile:
    """One graph for all ranks, in GE's format.

    GE outputs 0 to `outputs` - 1 are the program's results, in order; the outputs after them are donations.

    Attributes:
        graph: a serialised `ModelDef`; operators of `graph[0]` and of the graphs they call.
        options: compile options of this graph ("local" in torchair's terms).
        donations: (GE output, operand) pairs: GE writes that output into that operand's memory.
        bound: operands that operators of the graph write in place; they need nothing at run time.
        inputs: number of operands of the program; derived values are numbered from there on.
        outputs: number of results.
        patches: (operator name, attribute name, kind) for what differs between ranks; a "group" attribute holds the
            symbolic name until then, one of `GROUPS`.
        feeds: operand, or `inputs` plus the number of a derived value, of each `Data` op by its index; None: all operands, in order.
        engine: options of the engine, equal for all graphs of one process ("global" in torchair's terms).
        folded: computes the derived values; None where there are none.
        captured: it is none that operators are captured from when it is loaded.
        ordered: whether operators run as they are listed; GE guarantees no order beyond data.
    """

    suffix: ClassVar[str] = "ge"
    captured: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    graph: bytes
    options: Mapping[str, str]
    donations: tuple[tuple[int, int], ...]
    bound: tuple[int, ...]
    inputs: int
    outputs: int
    patches: tuple[tuple[str, str, str], ...]
    feeds: tuple[int, ...] | None = None
    engine: Mapping[str, str] = field(default_factory=dict)
    folded: Folded | None = None

    @property
    def operands(self) -> int:
        """Number of operands of the graph: those of the program, then the derived values."""
        return self.inputs + (self.folded.values if self.folded else 0)

    @property
    def written(self) -> tuple[int, ...]:
        """Operands that the graph writes, in place or by a donation."""
        return (*self.bound, *(operand for _, operand in self.donations))

    @property
    def overlaps(self) -> bool:
        """Whether operators run on several streams."""
        return any(STREAM in op.attr or op.type == FETCH for op in operators(parse(self.graph)))

    @property
    def data(self) -> tuple[int, ...]:
        """Operand or derived value of each `Data` op, by its index."""
        return tuple(range(self.inputs)) if self.feeds is None else self.feeds


def encode(ge_file: GeFile) -> bytes:
    """Bytes of a GE file; the order of its mappings and of its graph's protobuf maps does not change them.

    Raises:
        LoweringError: the GE file contradicts itself, or the graph is not a `ModelDef`.
    """
    _check(ge_file)
    return bytes(
        msgpack.packb(
            {
                "format": FORMAT,
                "graph": canonical(ge_file.graph),
                "options": dict(sorted(ge_file.options.items())),
                "engine": dict(sorted(ge_file.engine.items())),
                "donations": sorted(ge_file.donations),
                "bound": sorted(ge_file.bound),
                "inputs": ge_file.inputs,
                "outputs": ge_file.outputs,
                "patches": sorted(ge_file.patches),
                "feeds": ge_file.feeds,
                "folded": ge_file.folded and [ge_file.folded.graph, ge_file.folded.params, ge_file.folded.values],
            }
        )
    )


def decode(data: bytes) -> GeFile:
    """Reads what `encode` wrote.

    Raises:
        LoweringError: the bytes are something else, or of another format.
    """
    fields = fields_of(data, FORMAT)
    try:
        ge_file = GeFile(
            graph=fields["graph"],
            options=fields["options"],
            donations=tuple((output, operand) for output, operand in fields["donations"]),
            bound=tuple(fields["bound"]),
            inputs=fields["inputs"],
            outputs=fields["outputs"],
            patches=tuple((op, attribute, kind) for op, attribute, kind in fields["patches"]),
            feeds=None if fields["feeds"] is None else tuple(fields["feeds"]),
            engine=fields["engine"],
            folded=None if fields["folded"] is None else _folded(*fields["folded"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LoweringError(f"this is not a file of format {FORMAT!r}: {error!r}") from None
    _check(ge_file)
    return ge_file


def patched(ge_file: GeFile, rank: int, groups: Mapping[str, str]) -> GeFile:
    """The GE file of one rank.

    Args:
        ge_file: of all ranks; a patched one has no patches left.
        rank: number among all ranks.
        groups: communicator name by symbolic group, at least for the groups that the patches name.

    Raises:
        LoweringError: a patch names an operator, an attribute or a group that is not there.
    """
    if not ge_file.patches:
        return ge_file
    model = parse(ge_file.graph)
    by_name: dict[str, list[Any]] = {}
    for op in operators(model):
        by_name.setdefault(op.name, []).append(op)
    for name, attribute, kind in ge_file.patches:
        targets = [op for op in by_name.get(name, ()) if attribute in op.attr]
        if not targets:
            raise LoweringError(f"a patch is for attribute {attribute!r} of operator {name!r}, and the graph has no such operator")
        for op in targets:
            if kind == RANK:
                op.attr[attribute].i = rank
            else:
                op.attr[attribute].s = _communicator(op.attr[attribute].s.decode(), f"{name}.{attribute}", groups).encode()
    return replace(ge_file, graph=serialised(model), patches=())


def on_one_stream(ge_file: GeFile) -> GeFile:
    """The same operators, each on the graph's own stream, in the order of the graph, without those that fetch beside it."""
    model = parse(ge_file.graph)
    for op in operators(model):
        for name in {STREAM, PRIORITY} & set(op.attr):
            del op.attr[name]
    fetches = [op for op in model.graph[0].op if op.type == FETCH]
    for op in fetches:
        model.graph[0].op.remove(op)
    for op in model.graph[0].op:
        for tensor in [f"{fetch.name}:-1" for fetch in fetches] if op.type == "NetOutput" else ():
            op.input.remove(tensor)
    return replace(ge_file, graph=serialised(model))


class Canonical(bytes):
    """A `ModelDef` that was written here with its maps sorted: protobuf writes maps in an order that changes from run to run."""


def serialised(model: Any) -> Canonical:
    """The bytes of a `ModelDef` message."""
    return Canonical(model.SerializeToString(deterministic=True))


def canonical(graph: bytes) -> Canonical:
    """A `ModelDef` with its maps sorted; raises `LoweringError` where the bytes are none."""
    return graph if isinstance(graph, Canonical) else serialised(parse(graph))


def parse(graph: bytes) -> Any:
    """The `ModelDef` message in `graph`.

    Raises:
        LoweringError: the bytes are none, or it holds no graph.
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
    """Protobuf classes of GE's messages, read from the torch_npu wheel without importing torch_npu or torchair.

    Raises:
        LoweringError: torch_npu is not installed.
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


def _folded(graph: bytes, params: list[int], values: int) -> Folded:
    return Folded(graph, tuple(params), values)


def _check(ge_file: GeFile) -> None:
    feeds = ge_file.data
    if [operand for operand in feeds if not 0 <= operand < ge_file.operands] or len(set(feeds)) != len(feeds):
        raise LoweringError(f"a GE file of {ge_file.operands} operands feeds {feeds}; legal is each of them at most once")
    if ge_file.folded and (unknown := [operand for operand in ge_file.folded.params if not 0 <= operand < ge_file.inputs]):
        raise LoweringError(f"a GE file of {ge_file.inputs} operands folds operands {unknown}; legal are 0 to {ge_file.inputs - 1}")
    if ge_file.folded and (unfed := sorted(set(range(ge_file.inputs, ge_file.operands)) - set(feeds))):
        raise LoweringError(f"a GE file computes derived values {unfed}, which its graph does not take; it takes {feeds}")
    for action, operands in (("donates", [operand for _, operand in ge_file.donations]), ("writes in place", list(ge_file.bound))):
        if unfed := sorted(set(operands) - set(feeds)):
            raise LoweringError(f"a GE file {action} operands {unfed}, which its graph does not take; it takes {feeds}")
    for name, attribute, kind in ge_file.patches:
        if kind not in (RANK, GROUP):
            raise LoweringError(f"a patch of {name}.{attribute} is of kind {kind!r}; legal are {RANK!r} and {GROUP!r}")
