"""What GE and HCCL demand of a graph when it is compiled for a device, and would not say so clearly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ....graphs.errors import LoweringError
from ..ge_file import GROUPS
from ..nz_weights import fills_tiles, int4_words, is_weight
from ..operators.table import BY_TYPE, COMMUNICATING
from .communicator import Communicator
from .memory import FORMAT_NAMES, ND, NZ

_INT8, _INT32 = 3, 7
"""Numbers of dtypes in GE's messages."""


def data_formats(graph: Any) -> dict[str, int]:
    """Format of each `Data` operator's tensor, as `update_formats` wrote it.

    Raises:
        LoweringError: nothing was written.
    """
    formats = {}
    for op in graph.op:
        if op.type == "Data":
            if "format_for_int" not in op.output_desc[0].attr:
                raise LoweringError(f"{op.name} has no storage format; legal is that formats are written before the graph is compiled")
            formats[f"{op.name}:0"] = op.output_desc[0].attr["format_for_int"].i
    return formats


def check_formats(graph: Any) -> None:
    """Refuses operands in formats that their readers do not take.

    A tensor in NZ is legal where every reader is a matrix product that takes it as its weight, itself or as int4, and where its tiles
    are filled. Two products of experts in int8 take no other format: the one with activation and rounding (documentation of
    aclnnGroupedMatmulSwigluQuantV2 in Ascend/op-plugin), and the one with a scale in float32 (grouped_matmul_def.cpp of
    hicann/ops-transformer, 8.5.0.alpha001).

    Raises:
        LoweringError: naming operator, input and format.
    """
    formats = data_formats(graph)
    described = {f"{op.name}:0": op.output_desc[0] for op in graph.op if op.type == "Data"}
    for tensor, number in formats.items():
        if number not in FORMAT_NAMES:
            raise LoweringError(f"{tensor} is in format number {number}; legal are {FORMAT_NAMES}")
        if number == NZ and not fills_tiles(described[tensor]):
            raise LoweringError(f"{tensor} is in NZ and its sizes {list(described[tensor].shape.dim)} do not fill its tiles; legal is ND")
    words = int4_words(graph.op)
    formats |= {tensor: formats[source] for tensor, source in words.items()}
    for op in graph.op:
        if f"{op.name}:0" in words:
            continue
        for tensor, slot in zip(op.input, (desc.name for desc in op.input_desc), strict=False):
            if formats.get(tensor) == NZ and not is_weight(op.type, slot):
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, which is in NZ, as {slot}; legal is ND, or a product's weight")
            if formats.get(tensor) == NZ and tensor in described and described[tensor].dtype == _INT32:
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, int32 in NZ, as {slot}; legal is its Bitcast to int4")
            is_int8 = tensor in described and described[tensor].dtype == _INT8
            if formats.get(tensor) == ND and is_int8 and is_weight(op.type, slot) and _only_nz(op):
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, int8 in ND, as {slot}; legal is NZ for int8 weights")


def _only_nz(op: Any) -> bool:
    """Whether a product takes int8 weights in NZ alone."""
    operator = BY_TYPE.get(op.type)
    return operator is not None and operator.only_nz is not None and operator.only_nz(op)


def check_communication(graph: Any, communicators: Mapping[str, Communicator], rank: int) -> None:
    """Refuses communication operators whose attributes are not those of this process.

    Raises:
        LoweringError: naming operator, attribute and what is legal.
    """
    for op in graph.op:
        name = communicator_of(op)
        if name is None:
            continue
        if name in GROUPS and name not in communicators:
            raise LoweringError(f"{op.name} ({op.type}) communicates over the symbol {name!r}, which was not replaced by a communicator")
        if name not in communicators:
            known = ", ".join(sorted(communicators)) or "none"
            raise LoweringError(f"{op.name} ({op.type}) communicates over {name!r}; this process (rank {rank}) has {known}")
        communicator = communicators[name]
        wanted = {"ep_rank_id": communicator.index, "ep_world_size": communicator.size, "rank_size": communicator.size}
        for attribute, legal in wanted.items():
            if attribute in op.attr and op.attr[attribute].i != legal:
                raise LoweringError(
                    f"{op.name} ({op.type}): {attribute} is {op.attr[attribute].i}; rank {rank} is member {communicator.index} of the"
                    f" {communicator.size} of {name!r}, so that {legal} is legal"
                )


def communicator_of(op: Any) -> str | None:
    """The communicator that an operator names; None where it does not communicate."""
    for attribute in ("group_ep", "group"):
        if attribute in op.attr and op.type in COMMUNICATING:
            return str(op.attr[attribute].s.decode())
    return None


def claim(owners: dict[str, tuple[str, str]], graph: Any) -> None:
    """Notes who uses which communicator: expert dispatch and combine share theirs with no other operator of the process.

    Source: constraints of aclnnMoeDistributeDispatchV2 in the documentation of Ascend/op-plugin.

    Args:
        owners: communicator -> (what has it for itself, "" for collectives; an operator that uses it); of all graphs before, updated.

    Raises:
        LoweringError: naming the communicator and both operators.
    """
    for op in _communicating(graph.op):
        name, exchange = communicator_of(op), BY_TYPE[op.type].exchange
        assert name is not None
        before = owners.setdefault(name, (exchange, f"{graph.name}/{op.name} ({op.type})"))
        if before[0] != exchange:
            raise LoweringError(
                f"communicator {name!r} is used by {before[1]} and by {graph.name}/{op.name} ({op.type}); legal is a communicator of"
                " its own for expert dispatch and combine"
            )


def _communicating(ops: Iterable[Any]) -> list[Any]:
    return [op for op in ops if communicator_of(op) is not None]
