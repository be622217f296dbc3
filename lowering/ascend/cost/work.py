"""What one operator reads, writes, computes and sends, from the types of its operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....graphs.errors import LoweringError
from ..ge_types import TensorType
from ..inspect_ge import IN_PLACE
from .experts import Rows, experts_read

_MATRIX_ROWS = 16
"""Rows of a tile of the matrix unit: fewer take as long."""


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
        sent_bytes: received by a rank from others.
        group: symbol of the group that it communicates over; "" where it does not.
        exchange: "dispatch" or "combine" for the fused expert operators.
        steps: messages one after the other, of a collective.
    """

    hbm_bytes: float = 0.0
    cache_bytes: float = 0.0
    streamed_bytes: float = 0.0
    tasks: int = 0
    bf16_ops: float = 0.0
    int8_ops: float = 0.0
    attention_ops: float = 0.0
    vector_ops: float = 0.0
    sent_bytes: float = 0.0
    group: str = ""
    exchange: str = ""
    steps: int = 1

    @property
    def matrix(self) -> bool:
        """Whether it runs on the matrix unit."""
        return bool(self.bf16_ops or self.int8_ops or self.attention_ops)


@dataclass(frozen=True)
class Facts:
    """What the operators of one graph have in common.

    Attributes:
        types: type of each tensor.
        resident: tensors that lie in HBM: operands and views of them.
        pools: those of `resident` that some operator writes in place, or that are donated.
        context: cached tokens of each request.
        groups: ranks of each group.
        cache_bytes: results up to that size are read from the cache.
        expert_skew, expert_imbalance: see `Parameters`.
        rows: tokens by expert that each `group_list` describes.
    """

    types: Mapping[str, TensorType]
    resident: frozenset[str]
    pools: frozenset[str]
    context: int
    groups: Mapping[str, int]
    cache_bytes: float
    expert_skew: float
    expert_imbalance: float
    rows: Mapping[str, Rows] = field(default_factory=dict)


def works_of(op: Any, facts: Facts) -> tuple[Work, ...]:
    """The work of one launch, in the stages that it runs one after the other: one, but of operators that compute and communicate.

    Raises:
        LoweringError: as `work_of`.
    """
    stages = _STAGES.get(op.type)
    return stages(op, facts) if stages is not None else (work_of(op, facts),)


def work_of(op: Any, facts: Facts) -> Work:
    """The work of one launch.

    Raises:
        LoweringError: it communicates over a group that the mesh does not have, or lacks an input that its work follows from.
    """
    rule = _RULES.get(op.type)
    if rule is not None:
        return rule(op, facts)
    if op.type.startswith("Hcom"):
        raise LoweringError(f"{op.name} ({op.type}) is a collective whose bytes are not known; legal are {', '.join(_COLLECTIVES)}")
    return _generic(op, facts)


def slot(op: Any, name: str) -> str:
    """The tensor that an operator takes as the named input.

    Raises:
        LoweringError: it takes none.
    """
    for tensor, desc in zip(op.input, op.input_desc, strict=False):
        if desc.name == name and tensor:
            return str(tensor)
    raise LoweringError(f"{op.name} ({op.type}) has no input {name}; it has {', '.join(desc.name for desc in op.input_desc)}")


def _read(op: Any) -> list[str]:
    return [tensor for tensor in op.input if tensor and not tensor.endswith(":-1")]


def _written(op: Any, facts: Facts) -> list[str]:
    """Results that nobody reads have no type and are not counted."""
    return [tensor for port in range(len(op.output_desc)) if (tensor := f"{op.name}:{port}") in facts.types]


def _moved(facts: Facts, sizes: Mapping[str, float]) -> Work:
    """Bytes of tensors, by where they lie."""
    hbm = sum(size for tensor, size in sizes.items() if tensor in facts.resident or facts.types[tensor].nbytes > facts.cache_bytes)
    return Work(hbm_bytes=hbm, cache_bytes=sum(sizes.values()) - hbm)


def _whole(facts: Facts, tensors: list[str]) -> dict[str, float]:
    return {tensor: float(facts.types[tensor].nbytes) for tensor in tensors}


def _generic(op: Any, facts: Facts, passes: float = 1.0) -> Work:
    """Reads its operands and writes its results; of a pool only as much as its other operands have."""
    reads, writes = _whole(facts, _read(op)), _whole(facts, _written(op, facts))
    pools = {tensor for tensor in reads if tensor in facts.pools}
    in_place = {f"{op.name}:{port}" for port in IN_PLACE.get(op.type, {})} | ({f"{op.name}:0"} if op.type == "Assign" else set())
    others = sum(size for tensor, size in reads.items() if tensor not in pools)
    for tensor in pools:
        reads[tensor] = 0.0 if in_place else min(reads[tensor], max(others, *writes.values(), 0.0))
    for tensor in in_place & writes.keys():
        writes[tensor] = min(writes[tensor], others)
    elements = max((facts.types[tensor].elements for tensor in (*reads, *writes) if tensor not in pools | in_place), default=0)
    return replace(_moved(facts, reads | writes), vector_ops=passes * elements)


def _indexed(op: Any, facts: Facts) -> Work:
    """A gather or a slice reads what it gives."""
    sizes = {f"{op.name}:0": facts.types[f"{op.name}:0"].nbytes}
    source, result = op.input[0], facts.types[f"{op.name}:0"]
    moved = _moved(facts, {source: result.nbytes} | _whole(facts, _read(op)[1:2]))
    written = _moved(facts, sizes)
    return Work(moved.hbm_bytes + written.hbm_bytes, moved.cache_bytes + written.cache_bytes, vector_ops=result.elements)


def _sort(op: Any, facts: Facts) -> Work:
    width = facts.types[op.input[0]].shape[-1]
    return _generic(op, facts, passes=4.0 * max(1, width.bit_length()))


def _product(op: Any, facts: Facts, transposed: str = "transpose_x1") -> Work:
    left, out = facts.types[op.input[0]], facts.types[f"{op.name}:0"]
    inner = left.shape[-2] if transposed in op.attr and op.attr[transposed].b else left.shape[-1]
    rows, columns = (out.shape[-2], out.shape[-1]) if len(out.shape) > 1 else (1, out.shape[-1])
    batch = out.elements / max(rows * columns, 1)
    ops = 2.0 * batch * _padded(rows) * columns * inner
    moved = _moved(facts, _whole(facts, _read(op)) | _whole(facts, _written(op, facts)))
    return replace(moved, int8_ops=ops) if left.dtype in ("i8", "i4") else replace(moved, bf16_ops=ops * (2 if left.dtype == "f32" else 1))


def _padded(rows: float) -> float:
    return -(-rows // _MATRIX_ROWS) * _MATRIX_ROWS


def _grouped(op: Any, facts: Facts) -> Work:
    """Products of the rows that are there, by the experts that have any; the busiest rank decides."""
    x, stored = facts.types[op.input[0]], facts.types[slot(op, "weight0")]
    groups = slot(op, "group_list")
    told, rows = _rows(groups, x.shape[0], stored.shape[0], facts)
    read = experts_read(told, facts.expert_skew)
    columns = stored.elements * (8 if stored.dtype == "i32" else 1) / stored.shape[0] / x.shape[-1]
    sizes = _whole(facts, _read(op)) | _whole(facts, _written(op, facts))
    per_expert = {tensor for tensor in _read(op)[1:] if facts.types[tensor].shape[:1] == stored.shape[:1] and tensor != groups}
    share = rows / max(x.shape[0], 1)
    for tensor in sizes:
        if tensor in per_expert:
            sizes[tensor] *= read / stored.shape[0]
        elif facts.types[tensor].shape[:1] == x.shape[:1]:
            sizes[tensor] *= share
    # Each expert's rows fill tiles of their own.
    ops = 2.0 * max(rows, read * _MATRIX_ROWS / 2) * columns * x.shape[-1]
    moved = _moved(facts, sizes)
    return replace(moved, int8_ops=ops) if x.dtype in ("i8", "i4") else replace(moved, bf16_ops=ops)


def _rows(groups: str, padded: int, experts: int, facts: Facts) -> tuple[Rows, float]:
    """The rows that a list of group sizes describes, and how many the busiest rank has; at most those that tensors have room for."""
    told = facts.rows.get(groups, Rows(padded, padded, experts, experts))
    return told, min(told.local * (facts.expert_imbalance if told.experts > told.local_experts else 1.0), padded)


def _activation(op: Any, facts: Facts) -> Work:
    """An activation that is told its groups does the rows that are there."""
    whole, padded = _generic(op, facts, passes=6.0), facts.types[op.input[0]].shape[0]
    groups = next((t for t, desc in zip(op.input, op.input_desc, strict=False) if desc.name == "group_index" and t), "")
    if not groups:
        return whole
    share = _rows(groups, padded, facts.types[groups].shape[0], facts)[1] / max(padded, 1)
    scaled = {name: share * getattr(whole, name) for name in ("hbm_bytes", "cache_bytes", "vector_ops")}
    return replace(whole, **scaled)


def _attention(op: Any, facts: Facts) -> Work:
    """Paged attention reads the cached keys and values of each request once; of latent keys the values are a part."""
    query, key = facts.types[slot(op, "query")], facts.types[slot(op, "key0")]
    heads, kv_heads = int(op.attr["num_heads"].i), int(op.attr["num_key_value_heads"].i) or int(op.attr["num_heads"].i)
    table = next((facts.types[t] for t, desc in zip(op.input, op.input_desc, strict=False) if desc.name == "block_table" and t), None)
    block = int(op.attr["block_size"].i) or 128
    if table is None:
        batch, most = key.shape[0], key.elements // max(key.shape[0], 1)
        width = key.shape[-1] if len(key.shape) == 4 else key.shape[-1] // kv_heads
        most //= kv_heads * width
    else:
        batch, most, width = table.shape[0], table.shape[1] * block, key.elements // (key.shape[0] * block * kv_heads)
    tokens = query.elements // (heads * width)
    new = tokens / max(batch, 1)
    keys = min(max(facts.context, new), most)
    rotary = next((facts.types[t] for t, desc in zip(op.input, op.input_desc, strict=False) if desc.name == "key_rope" and t), None)
    entry = 2 * kv_heads * width if rotary is None else width + rotary.shape[-1]
    scales = next(
        (facts.types[t] for t, desc in zip(op.input, op.input_desc, strict=False) if desc.name == "key_antiquant_scale" and t), None
    )
    # Scales in pages are of a token and head; those of channels are read once.
    beside = 2 * kv_heads * 4 if scales is not None and len(scales.shape) == 3 else 0
    streamed = 1.0 * batch * keys * (entry * key.nbytes / max(key.elements, 1) + beside)
    ops = 2.0 * tokens * heads * (2 * width + (rotary.shape[-1] if rotary else 0)) * max(keys - new / 2, 1.0)
    moved = _moved(facts, _whole(facts, [slot(op, "query"), *_written(op, facts)]))
    # Long queries are split into blocks of rows as well.
    tasks = int(batch * kv_heads * max(1, new * heads / kv_heads // 128))
    return replace(moved, streamed_bytes=streamed, attention_ops=ops, tasks=tasks)


def _delta_rule(op: Any, facts: Facts) -> Work:
    """Reads a state a request and writes a state a token."""
    value, state = facts.types[slot(op, "value")], facts.types[slot(op, "state")]
    batch, tokens = facts.types[slot(op, "actual_seq_lengths")].shape[0], value.shape[0]
    one = state.nbytes / state.shape[0]
    plain = [tensor for tensor in (*_read(op), f"{op.name}:0") if tensor != slot(op, "state")]
    moved = _moved(facts, _whole(facts, plain))
    return replace(moved, streamed_bytes=one * (batch + tokens), vector_ops=6.0 * tokens * state.elements / state.shape[0])


def _collective(received: Callable[[float, float, int], float], steps: int, op: Any, facts: Facts) -> Work:
    group = op.attr["group"].s.decode()
    if group not in facts.groups:
        raise LoweringError(f"{op.name} ({op.type}) communicates over {group!r}; the mesh has {', '.join(sorted(facts.groups))}")
    given, result = facts.types[op.input[0]].nbytes, facts.types[f"{op.name}:0"].nbytes
    return Work(sent_bytes=received(given, result, facts.groups[group]), group=group, steps=steps)


_COLLECTIVES: dict[str, Callable[[Any, Facts], Work]] = {
    "HcomAllGather": functools.partial(_collective, lambda given, result, n: result * (n - 1) / n, 1),
    "HcomReduceScatter": functools.partial(_collective, lambda given, result, n: given * (n - 1) / n, 1),
    "HcomAllReduce": functools.partial(_collective, lambda given, result, n: 2 * given * (n - 1) / n, 2),
    "HcomAllToAll": functools.partial(_collective, lambda given, result, n: given * (n - 1) / n, 1),
    # Buffers of an uneven exchange are sized for the worst case; tokens spread evenly, up to the imbalance, fill what was given.
    "HcomAllToAllV": functools.partial(_collective, lambda given, result, n: min(given, result) * (n - 1) / n, 1),
    "HcomBroadcast": functools.partial(_collective, lambda given, result, n: result * (n - 1) / n, 1),
}


def _expert_exchange(kind: str, op: Any, facts: Facts) -> Work:
    """A row a token and chosen expert; the busiest rank decides."""
    ids = facts.types[slot(op, "expert_ids")]
    rows = facts.types[slot(op, "x") if kind == "dispatch" else slot(op, "expand_x")]
    sent = facts.types[f"{op.name}:0"] if kind == "dispatch" else rows
    ranks = int(op.attr["ep_world_size"].i)
    nbytes = ids.elements * sent.nbytes / max(sent.shape[0], 1) * (ranks - 1) / ranks
    return Work(sent_bytes=nbytes * facts.expert_imbalance, group=op.attr["group_ep"].s.decode(), exchange=kind)


def _product_and_sum(op: Any, facts: Facts) -> tuple[Work, Work]:
    """A product, whose result each rank of the group gets its rows of the sum of."""
    ranks = facts.groups[op.attr["group"].s.decode()]
    left, out = facts.types[op.input[0]], facts.types[f"{op.name}:0"]
    whole = float(out.nbytes * ranks)
    ops = 2.0 * _padded(left.shape[0]) * out.shape[-1] * left.shape[-1]
    product = replace(_moved(facts, _whole(facts, _read(op))), bf16_ops=ops * (2 if left.dtype == "f32" else 1))
    return product, Work(sent_bytes=whole * (ranks - 1) / ranks, group=op.attr["group"].s.decode())


def _fused_experts(op: Any, facts: Facts) -> tuple[Work, ...]:
    """A row a token and chosen expert goes to its expert as int8 and comes back as it was; between them the experts' two products."""
    group, ranks = op.attr["group"].s.decode(), int(op.attr["ranks"].i)
    x, ids, first, second = (facts.types[slot(op, name)] for name in ("x", "expert_idx", "weight1", "weight2"))
    there = ids.elements * x.shape[-1] * (ranks - 1) / ranks * facts.expert_imbalance
    back = there * x.nbytes / max(x.elements, 1)
    local = first.shape[0]
    read = experts_read(Rows(ids.elements, ids.elements * ranks, local, local * ranks), facts.expert_skew)
    rows = ids.elements * facts.expert_imbalance
    weights = sum(facts.types[slot(op, name)].nbytes for name in ("weight1", "weight2", "scale1", "scale2", "bias1", "bias2"))
    # int32 hold eight int4.
    per_expert = sum(weight.elements * (8 if weight.dtype == "i32" else 1) for weight in (first, second)) / local
    ops = 2.0 * max(rows, read * _MATRIX_ROWS / 2) * per_expert
    products = Work(hbm_bytes=weights * read / local, int8_ops=ops, vector_ops=6.0 * rows * second.shape[1])
    return (
        Work(sent_bytes=there, group=group, exchange="dispatch"),
        products,
        Work(sent_bytes=back, group=group, exchange="combine"),
    )


def _chunked_rule(op: Any, facts: Facts) -> Work:
    """Products within chunks of 64 tokens, the inverse of a chunk's triangle not counted, and of states with them (arXiv:2412.06464)."""
    value, key = facts.types[slot(op, "value")], facts.types[slot(op, "key")]
    (tokens, heads, Dv), Dk = value.shape, key.shape[-1]
    ops = 2.0 * tokens * heads * (2 * _CHUNK * (Dk + Dv) + 3 * Dk * Dv)
    return replace(_generic(op, facts), bf16_ops=ops)


_CHUNK = 64
"""Tokens of a chunk of the chunked rule: assumed."""

_Stages = Callable[[Any, Facts], tuple[Work, ...]]
_STAGES: dict[str, _Stages] = {"aclnnMatmulReduceScatterV2": _product_and_sum, "dispatch_ffn_combine": _fused_experts}

_Rule = Callable[[Any, Facts], Work]
_RULES: dict[str, _Rule] = {
    **_COLLECTIVES,
    **dict.fromkeys(("GatherV2", "GatherElements", "StridedSliceV2", "StridedSlice", "Slice"), _indexed),
    **dict.fromkeys(("MatMul", "MatMulV2", "MatMulV3", "QuantBatchMatmulV3", "WeightQuantBatchMatmulV2"), _product),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2"), functools.partial(_product, transposed="adj_x1")),
    **dict.fromkeys(("GroupedMatmul", "GroupedMatmulSwigluQuantV2"), _grouped),
    **dict.fromkeys(("Sort", "TopKV2", "aclnnSort", "aclnnTopk"), _sort),
    **dict.fromkeys(("aclnnEmbedding", "aclnnGather", "aclnnIndex", "aclnnIndexSelect"), _indexed),
    **dict.fromkeys(("aclnnBatchMatMul", "aclnnMatmulWeightNz", "aclnnMm"), _product),
    "aclnnChunkGatedDeltaRule": _chunked_rule,
    **dict.fromkeys(("RmsNorm", "AddRmsNorm", "SoftmaxV2", "SwiGlu", "DynamicQuant"), functools.partial(_generic, passes=6.0)),
    "AscendQuantV2": functools.partial(_generic, passes=4.0),
    "DequantSwigluQuant": _activation,
    "FusedInferAttentionScore": _attention,
    "RecurrentGatedDeltaRule": _delta_rule,
    **{f"MoeDistributeDispatch{v}": functools.partial(_expert_exchange, "dispatch") for v in ("V2", "V3")},
    **{f"MoeDistributeCombine{v}": functools.partial(_expert_exchange, "combine") for v in ("V2", "V3")},
}
