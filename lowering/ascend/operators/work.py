"""What one operator reads, writes, computes and sends, from the types of its operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .node import Node
from .tensor_type import TensorType

MATRIX_ROWS = 16
"""Rows of a tile of the matrix unit: fewer take as long."""


class KernelTime(NamedTuple):
    """What profiles say of an operator's kernel beyond the rates of its chip (docs/lab/npu-graphs.md, `npucompile calibrate --profile`).

    Attributes:
        fixed_s: from its start to its end with hardly any work; None: as most kernels of its unit.
        slowdown: time of large operands over what the rates of the chip say.
    """

    fixed_s: float | None = None
    slowdown: float = 1.0


AS_MOST = KernelTime()
"""Of an operator of which no profile is known."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does in one step on one rank.

    Attributes:
        hbm_bytes: moved between HBM and cores.
        cache_bytes: moved between the L2 cache and cores.
        streamed_bytes: keys, values and states that attention or a recurrence reads or writes, in HBM.
        tasks: independent parts of the stream; each runs on one core. 0 where all cores share it evenly.
        bf16_ops, int8_ops, attention_ops: operations of the matrix unit; a multiplication and an addition are two.
        vector_ops: element operations of the vector unit.
        fetched_bytes: moved from HBM into the cache, by no core.
        sent_bytes: received by a rank from others.
        group: symbol of the group that it communicates over; "" where it does not.
        exchange: "dispatch" or "combine" for the fused expert operators.
        steps: messages one after the other, of a collective.
        time: what its kernel takes beside all that.
    """

    hbm_bytes: float = 0.0
    cache_bytes: float = 0.0
    streamed_bytes: float = 0.0
    tasks: int = 0
    bf16_ops: float = 0.0
    int8_ops: float = 0.0
    attention_ops: float = 0.0
    vector_ops: float = 0.0
    fetched_bytes: float = 0.0
    sent_bytes: float = 0.0
    group: str = ""
    exchange: str = ""
    steps: int = 1
    time: KernelTime = AS_MOST

    @property
    def matrix(self) -> bool:
        """Whether it runs on the matrix unit."""
        return bool(self.bf16_ops or self.int8_ops or self.attention_ops)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a grouped product; a row is a token and one of its experts.

    Attributes:
        local: rows of the experts of a rank if all ranks get equally many.
        total: rows of all experts that the tokens of these experts choose from.
        local_experts: experts of a rank.
        experts: experts of all ranks.
    """

    local: float
    total: float
    local_experts: int
    experts: int


@dataclass(frozen=True)
class Facts:
    """What the operators of one graph have in common.

    Attributes:
        types: type of each tensor.
        resident: tensors that lie in HBM, operands and views of them -> the operand.
        pools: those of `resident` that some operator writes in place, or that are donated.
        context: cached tokens of each request.
        groups: ranks of each group.
        cache_bytes: results of a launch up to that size together are in the cache.
        expert_skew, expert_imbalance: see `Parameters`.
        rows: tokens by expert that each `group_list` describes.
    """

    types: Mapping[str, TensorType]
    resident: Mapping[str, str]
    pools: frozenset[str]
    context: int
    groups: Mapping[str, int]
    cache_bytes: float
    expert_skew: float
    expert_imbalance: float
    rows: Mapping[str, Rows] = field(default_factory=dict)


WorkRule = Callable[[Node, Facts], Work]
"""Operator and facts of its graph -> its work in one launch."""
Stages = Callable[[Node, Facts], tuple[Work, ...]]
"""The same for the stages that an operator runs one after the other."""


def results_of(op: Node, facts: Facts) -> list[str]:
    """Results that nobody reads have no type and are not counted."""
    return [tensor for port in range(op.results) if (tensor := f"{op.name}:{port}") in facts.types]


def bytes_moved(facts: Facts, sizes: Mapping[str, float]) -> Work:
    """Bytes of tensors, by where they lie: the cache has all results that a launch reads and writes, or none of them."""
    cached = {tensor: size for tensor, size in sizes.items() if tensor not in facts.resident}
    left, hbm = sum(cached.values()), sum(sizes.values()) - sum(cached.values())
    if max(left, *(facts.types[tensor].nbytes for tensor in cached), 0.0) > facts.cache_bytes:
        return Work(hbm_bytes=hbm + left)
    return Work(hbm_bytes=hbm, cache_bytes=left)


def whole_tensors(facts: Facts, tensors: list[str]) -> dict[str, float]:
    """Bytes of each tensor."""
    return {tensor: float(facts.types[tensor].nbytes) for tensor in tensors}


def generic(op: Node, facts: Facts, passes: float = 1.0, written: Iterable[int] = ()) -> Work:
    """Reads its operands and writes its results; of a pool only as much as its other operands have.

    Args:
        passes: operations of the vector unit for each element.
        written: results that overwrite an input.
    """
    reads, writes = whole_tensors(facts, op.reads), whole_tensors(facts, results_of(op, facts))
    pools = {tensor for tensor in reads if tensor in facts.pools}
    in_place = {f"{op.name}:{port}" for port in written}
    others = sum(size for tensor, size in reads.items() if tensor not in pools)
    for tensor in pools:
        reads[tensor] = 0.0 if in_place else min(reads[tensor], max(others, *writes.values(), 0.0))
    for tensor in in_place & writes.keys():
        writes[tensor] = min(writes[tensor], others)
    elements = max((facts.types[tensor].elements for tensor in (*reads, *writes) if tensor not in pools | in_place), default=0)
    return replace(bytes_moved(facts, reads | writes), vector_ops=passes * elements)


def indexed(op: Node, facts: Facts) -> Work:
    """A gather or a slice reads what it gives."""
    sizes = {f"{op.name}:0": facts.types[f"{op.name}:0"].nbytes}
    source, result = op.input[0], facts.types[f"{op.name}:0"]
    moved = bytes_moved(facts, {source: result.nbytes} | whole_tensors(facts, op.reads[1:2]))
    written = bytes_moved(facts, sizes)
    return Work(moved.hbm_bytes + written.hbm_bytes, moved.cache_bytes + written.cache_bytes, vector_ops=result.elements)


def fetch(op: Node, facts: Facts) -> Work:
    """Moves the first bytes of its operand into the cache."""
    return Work(fetched_bytes=float(min(facts.types[op.input[0]].nbytes, op.attributes["max_size"])))


def sorting(op: Node, facts: Facts) -> Work:
    """A sort passes over its values a number of times that grows with the logarithm of their number."""
    width = facts.types[op.input[0]].shape[-1]
    return generic(op, facts, passes=4.0 * max(1, width.bit_length()))


def product(op: Node, facts: Facts, transposed: str = "transpose_x1") -> Work:
    """A matrix product; attribute `transposed` says whether the first matrix is."""
    left, out = facts.types[op.input[0]], facts.types[f"{op.name}:0"]
    inner = left.shape[-2] if op.attributes.get(transposed) else left.shape[-1]
    rows, columns = (out.shape[-2], out.shape[-1]) if len(out.shape) > 1 else (1, out.shape[-1])
    batch = out.elements / max(rows * columns, 1)
    ops = 2.0 * batch * padded_rows(rows) * columns * inner
    moved = bytes_moved(facts, whole_tensors(facts, op.reads) | whole_tensors(facts, results_of(op, facts)))
    return replace(moved, int8_ops=ops) if left.dtype in ("i8", "i4") else replace(moved, bf16_ops=ops * (2 if left.dtype == "f32" else 1))


def padded_rows(rows: float) -> float:
    """Rows with those that fill the last tile of the matrix unit."""
    return -(-rows // MATRIX_ROWS) * MATRIX_ROWS


def busiest_rows(groups: str, padded: int, experts: int, facts: Facts) -> tuple[Rows, float]:
    """The rows that a list of group sizes describes, and how many the busiest rank has; at most those that tensors have room for."""
    told = facts.rows.get(groups, Rows(padded, padded, experts, experts))
    return told, min(told.local * (facts.expert_imbalance if told.experts > told.local_experts else 1.0), padded)


@functools.lru_cache(maxsize=256)
def experts_read(rows: Rows, skew: float) -> float:
    """Experts of a rank that get at least a row, and whose weights are read, on average.

    The i-th most popular of n experts is chosen with a probability in proportion to i^-skew, independently for each row.
    """
    weights = [math.exp(-skew * math.log(i + 1)) for i in range(rows.experts)]
    scale = 1 / sum(weights)
    chosen = sum(1 - math.exp(rows.total * math.log1p(-min(weight * scale, 1 - 1e-12))) for weight in weights)
    return chosen * rows.local_experts / rows.experts
