"""What a bring-up knows of single GE operators: one record an operator, with the risk that it is about and the operands that it allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ....lowering.ascend.operators.call import GeOp

Tensors = Mapping[str, torch.Tensor]
LARGE = 64.0
"""Size of large floats: their products still fit float16."""
Indices = Callable[[GeOp, torch.Tensor, Tensors, torch.Generator], torch.Tensor]
"""Legal values of an integer input: from its recorded value and the recorded inputs of the operator."""
Corner = tuple[str, dict[str, torch.Tensor]]
"""What is special about a set of operands, and the inputs that are changed for it."""
LAST = 99


@dataclass(frozen=True)
class OperatorRules:
    """What a bring-up knows of one type of operator.

    Attributes:
        order: operators run in this order, those of most risk first.
        wrong: the assumption (risks.py) that a wrong result refutes.
        refused: the assumption that a refusal of the device refutes. A build checks operators that have their own against its tables.
        layer: the assumption that is wrong where a layer with this operator is, although each of its operators is right alone.
        distinct: its integer results depend on the order of floats, of which a device may choose any among equal ones.
        any_integers: it takes any integers as data, besides sizes and axes, which are constants.
        positive: inputs above zero: divisors, and operands of logarithms and roots.
        floats: changes random floats of an input so that the operator's documentation allows them.
        indices: legal values of integer inputs.
        corners: sets of operands at the border of what is legal.
    """

    order: int = LAST
    wrong: str = "kernels"
    refused: str = "compiles"
    layer: str = ""
    distinct: bool = False
    any_integers: bool = False
    positive: tuple[str, ...] = ()
    floats: Callable[[str, torch.Tensor], torch.Tensor] = lambda slot, drawn: drawn
    indices: Mapping[str, Indices] = field(default_factory=dict)
    corners: Callable[[GeOp, Tensors], Iterator[Corner]] = lambda op, recorded: iter(())


def _gather_index(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    axis = int(recorded["axis"].flatten()[0]) if "axis" in recorded else int(op.attrs.get("dim", 0))
    return torch.randint(0, recorded["x"].shape[axis], tuple(value.shape), generator=generator)


def _pool_rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different rows of the pool: writing one twice is undefined."""
    pool = recorded["var"] if "var" in recorded else recorded["key_cache"].flatten(0, 1)
    if value.numel() > pool.shape[0]:
        return value
    return torch.randperm(pool.shape[0], generator=generator)[: value.numel()].reshape(value.shape)


def _expert_range(op: GeOp) -> tuple[int, int]:
    first, last = op.attrs.get("active_expert_range") or (0, op.attrs.get("expert_num", 1))
    return int(first), int(last)


def _experts(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different experts for the choices of a token."""
    first, last = _expert_range(op)
    if last - first < value.shape[1]:
        return value
    return torch.stack([first + torch.randperm(last - first, generator=generator)[: value.shape[1]] for _ in range(value.shape[0])])


def _expert_corners(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    ids, (first, last) = recorded["expert_idx"], _expert_range(op)
    choices = torch.arange(ids.shape[1], dtype=ids.dtype)
    yield "all tokens to the same experts", {"expert_idx": (first + choices % max(1, last - first)).expand(ids.shape).contiguous()}
    if int(op.attrs.get("expert_num", last)) > last:
        yield "no token to an expert of this rank", {"expert_idx": torch.full_like(ids, last)}


def _routed_rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(value.numel(), generator=generator)


def _groups(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    counts = torch.randint(0, len(value), (_grouped_rows(recorded) * 3 // 4,), generator=generator).bincount(minlength=len(value))
    return counts.cumsum(0) if _are_running(op) else counts


def _group_corners(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    if "group_list" in recorded:
        groups = recorded["group_list"]
        empty = [0] * (len(groups) - 1)
        for name, counts in (("no rows", [0, *empty]), ("one group has all", [*empty, _grouped_rows(recorded)])):
            values = torch.tensor(counts, dtype=groups.dtype)
            yield name, {"group_list": values.cumsum(0) if _are_running(op) else values}


def _grouped_rows(recorded: Tensors) -> int:
    return (recorded["x0"] if "x0" in recorded else recorded["x"]).shape[0]


def _are_running(op: GeOp) -> bool:
    """Whether a list of groups has running sums of their rows instead of their numbers."""
    return bool(op.attrs.get("group_list_type", 0) == 0)


def _padded_rows(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    if (lengths := recorded.get("actual_seq_lengths_kv")) is not None:
        yield "every row but the first is padding", {"actual_seq_lengths_kv": torch.cat([lengths[:1], torch.zeros_like(lengths[1:])])}


def _first_tokens(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    if (accepted := recorded.get("num_accepted_tokens")) is not None:
        yield "every row goes on from its first token", {"num_accepted_tokens": torch.ones_like(accepted)}


def _delta_rule_floats(slot: str, drawn: torch.Tensor) -> torch.Tensor:
    # Queries and keys are normalised, gates are logarithms of decays, beta is a sigmoid; anything else diverges on any machine.
    allowed = {"g": -drawn.abs(), "beta": drawn.sigmoid(), "state": 0.3 * drawn}
    return allowed.get(slot, torch.nn.functional.normalize(drawn, dim=-1))


_GROUPED = "grouped-products"
_EXCHANGE = "expert-exchange"
_ANY_INTEGERS = OperatorRules(any_integers=True)
_DISTINCT = OperatorRules(distinct=True)
_POSITIVE = OperatorRules(positive=("x",))

RULES: Mapping[str, OperatorRules] = {
    "RecurrentGatedDeltaRule": OperatorRules(
        1, "delta-rule", "delta-rule", layer="delta-rule", floats=_delta_rule_floats, corners=_first_tokens
    ),
    "FusedInferAttentionScore": OperatorRules(0, "lengths", "attention", layer="lengths", corners=_padded_rows),
    "BatchMatMul": OperatorRules(layer="delta-rule-prefill"),
    "BatchMatMulV2": OperatorRules(layer="delta-rule-prefill"),
    "ScatterPaKvCache": OperatorRules(2, "kv-writes", indices={"slot_mapping": _pool_rows}),
    "ScatterNdUpdate": OperatorRules(3, "kv-writes", indices={"indices": _pool_rows}),
    "GroupedMatmul": OperatorRules(4, _GROUPED, _GROUPED, indices={"group_list": _groups}, corners=_group_corners),
    "GroupedMatmulSwigluQuantV2": OperatorRules(5, _GROUPED, _GROUPED, indices={"group_list": _groups}, corners=_group_corners),
    "DequantSwigluQuant": OperatorRules(6, "int8"),
    "MoeGatingTopKSoftmaxV2": OperatorRules(7, "gating", distinct=True),
    "MoeInitRoutingV3": OperatorRules(8, _EXCHANGE, indices={"expert_idx": _experts}, corners=_expert_corners),
    "MoeFinalizeRoutingV2": OperatorRules(9, _EXCHANGE, indices={"expanded_row_idx": _routed_rows}),
    "QuantBatchMatmulV3": OperatorRules(10, "int8"),
    "DynamicQuant": OperatorRules(11, "int8"),
    "AddRmsNormDynamicQuant": OperatorRules(12, "int8"),
    "MoeDistributeDispatchV2": OperatorRules(wrong=_EXCHANGE, refused=_EXCHANGE),
    "MoeDistributeCombineV2": OperatorRules(wrong=_EXCHANGE, refused=_EXCHANGE),
    "RotaryMul": OperatorRules(wrong="partial-rotary"),
    "SwiGlu": OperatorRules(wrong="int8"),
    "GatherV2": OperatorRules(indices={"indices": _gather_index}),
    "GatherElements": OperatorRules(indices={"index": _gather_index}),
    "Exp": OperatorRules(floats=lambda slot, drawn: drawn.clamp(-LARGE, 8.0)),
    "Pow": OperatorRules(floats=lambda slot, drawn: drawn.abs().clamp(0.1, 8.0)),
    "RealDiv": OperatorRules(positive=("x2",)),
    "FloorDiv": OperatorRules(positive=("x2",), any_integers=True),
    "FloorMod": OperatorRules(positive=("x2",), any_integers=True),
    **dict.fromkeys(("Reciprocal", "Log", "Sqrt", "Rsqrt", "Log1p"), _POSITIVE),
    **dict.fromkeys(("Sort", "TopKV2", "ArgMaxV2", "ArgMaxWithValue"), _DISTINCT),
    **dict.fromkeys(
        (
            "Abs", "Neg", "Sign", "Add", "AddV2", "Sub", "Mul", "Maximum", "Minimum", "Equal", "NotEqual", "Less", "LessEqual", "Greater",
            "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "Cast", "SelectV2", "MaskedFill", "Identity", "TensorMove", "Reshape",
            "Squeeze", "Unsqueeze", "Transpose", "BroadcastTo", "ConcatV2", "Concat", "Pack", "Unpack", "Split", "SplitV", "StridedSliceV2",
            "PadV3", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceAny", "ReduceAll", "Cumsum", "ClipByValueV2", "Tile", "ZerosLike",
            "OnesLike",
        ),
        _ANY_INTEGERS,
    ),
}  # fmt: skip
"""Rules by type; where several of a layer's operators have a `layer`, the first one here decides."""
_NO_RULES = OperatorRules()


def rules_of(op_type: str) -> OperatorRules:
    """The rules of a type of operator; those of an operator without any particular risk where it has none."""
    return RULES.get(op_type, _NO_RULES)
