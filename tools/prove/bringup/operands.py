"""Operands for single operators: as recorded in a step, random, and extreme ones, all of which the operator's documentation allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ....lowering.ascend.emulator.ge_ops_common import GeOp

Tensors = Mapping[str, torch.Tensor]
LARGE = 64.0
"""Size of large floats: their products still fit float16."""
POSITIVE = {"Log", "Sqrt", "Rsqrt", "Log1p"}
DIVISORS = {"RealDiv": ("x2",), "FloorDiv": ("x2",), "FloorMod": ("x2",), "Reciprocal": ("x",)}
ORDERED = {"Sort": -1, "TopKV2": -1, "ArgMaxV2": -1, "ArgMaxWithValue": -1, "MoeGatingTopKSoftmaxV2": -1}
"""Operators whose integer results depend on the order of floats: among equal values a device may choose any."""
ELEMENTWISE = {
    "Abs", "Neg", "Sign", "Add", "AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Equal", "NotEqual", "Less",
    "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "Cast", "SelectV2", "MaskedFill", "Identity",
    "TensorMove", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "BroadcastTo", "ConcatV2", "Concat", "Pack", "Unpack", "Split",
    "SplitV", "StridedSliceV2", "PadV3", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceAny", "ReduceAll", "Cumsum", "ClipByValueV2",
    "Tile", "ZerosLike", "OnesLike",
}  # fmt: skip
"""Operators that take any integers as data, besides sizes and axes, which are constants."""


@dataclass(frozen=True)
class Draw:
    """How operands are drawn.

    Attributes:
        floats: of a tensor of that shape.
        int8: the same for int8.
    """

    name: str
    floats: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
    int8: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator) * 2 - 1


DRAWS = (
    Draw("random", _normal, lambda shape, generator: torch.randint(-127, 128, shape, generator=generator)),
    Draw("zeros", lambda shape, _: torch.zeros(shape), lambda shape, _: torch.zeros(shape)),
    Draw("large", lambda shape, generator: LARGE * _signs(shape, generator), lambda shape, generator: 127 * _signs(shape, generator)),
)


def variants(op: GeOp, recorded: Tensors, written: frozenset[str]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Sets of operands by GE's name of the input, each with what is special about it.

    Args:
        recorded: values of a legal step; constants are among them and are not changed.
        written: inputs that the operator writes; they are pools, and finite.
    """
    finite = {slot: _finite(value) for slot, value in recorded.items()}
    if op.type not in ORDERED:
        yield "recorded", finite
    for number, draw in enumerate(DRAWS):
        if draw.name != "random" and (op.type in ORDERED or (draw.name == "zeros" and (op.type in POSITIVE or op.type in DIVISORS))):
            continue
        generator = torch.Generator().manual_seed(number)
        yield draw.name, {slot: _drawn(op, slot, value, finite, draw, generator) for slot, value in finite.items()}
    for name, changed in special_cases(op, finite):
        yield name, {**finite, **changed}


def special_cases(op: GeOp, recorded: Tensors) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Corners of an operator's integer operands: experts without tokens, one expert with all, padding, the null slot."""
    if "group_list" in recorded:
        rows = (recorded["x0"] if "x0" in recorded else recorded["x"]).shape[0]
        groups, running = recorded["group_list"], op.attrs.get("group_list_type", 0) == 0
        for name, counts in (("no rows", [0] * len(groups)), ("one group has all", [0] * (len(groups) - 1) + [rows])):
            counts_tensor = torch.tensor(counts, dtype=groups.dtype)
            yield name, {"group_list": counts_tensor.cumsum(0) if running else counts_tensor}
    if op.type == "MoeInitRoutingV3":
        ids, (first, last) = recorded["expert_idx"], _expert_range(op)
        choices = torch.arange(ids.shape[1], dtype=ids.dtype)
        yield "all tokens to the same experts", {"expert_idx": (first + choices % max(1, last - first)).expand(ids.shape).contiguous()}
        if int(op.attrs.get("expert_num", last)) > last:
            yield "no token to an expert of this rank", {"expert_idx": torch.full_like(ids, last)}
    if op.type == "FusedInferAttentionScore" and "actual_seq_lengths_kv" in recorded:
        lengths = recorded["actual_seq_lengths_kv"]
        yield "every row but the first is padding", {"actual_seq_lengths_kv": torch.cat([lengths[:1], torch.zeros_like(lengths[1:])])}
    if op.type == "RecurrentGatedDeltaRule" and "num_accepted_tokens" in recorded:
        accepted = recorded["num_accepted_tokens"]
        yield "every row goes on from its first token", {"num_accepted_tokens": torch.ones_like(accepted)}


def _drawn(op: GeOp, slot: str, value: torch.Tensor, recorded: Tensors, draw: Draw, generator: torch.Generator) -> torch.Tensor:
    shape = tuple(value.shape)
    if value.dtype.is_floating_point:
        return _floats(op, slot, value, draw, generator)
    if value.dtype == torch.int8:
        return draw.int8(shape, generator).to(torch.int8)
    if value.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool() if op.type in ELEMENTWISE else value
    legal = _INDICES.get((op.type, slot))
    if legal is not None:
        return legal(op, value, recorded, generator).to(value.dtype)
    if op.type in ELEMENTWISE and slot not in _SIZES:
        low = 1 if slot in DIVISORS.get(op.type, ()) else -100
        return torch.randint(low, 101, shape, generator=generator).to(value.dtype)
    return value


_SIZES = {
    "shape",
    "axes",
    "axis",
    "perm",
    "begin",
    "end",
    "strides",
    "size_splits",
    "split_dim",
    "concat_dim",
    "multiples",
    "paddings",
    "dims",
}


def _floats(op: GeOp, slot: str, value: torch.Tensor, draw: Draw, generator: torch.Generator) -> torch.Tensor:
    shape = tuple(value.shape)
    if op.type in ORDERED:
        return distinct(shape, value.dtype, generator)
    drawn = draw.floats(shape, generator)
    if op.type == "RecurrentGatedDeltaRule":
        # Queries and keys are normalised, gates are logarithms of decays, beta is a sigmoid; anything else diverges on any machine.
        drawn = {"g": -drawn.abs(), "beta": drawn.sigmoid(), "state": 0.3 * drawn}.get(slot, torch.nn.functional.normalize(drawn, dim=-1))
    if op.type == "Exp":
        drawn = drawn.clamp(-LARGE, 8.0)
    if op.type == "Pow":
        drawn = drawn.abs().clamp(0.1, 8.0)
    if op.type in POSITIVE or slot in DIVISORS.get(op.type, ()) or "scale" in slot:
        drawn = drawn.abs() + 0.125
    return drawn.to(value.dtype)


def distinct(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values that differ along the last dimension, in random order; as far as the dtype has that many."""
    if not shape:
        return torch.ones(shape, dtype=dtype)
    rows = [torch.randperm(shape[-1], generator=generator) for _ in range(max(1, torch.Size(shape[:-1]).numel()))]
    numbers = torch.stack(rows).reshape(shape)
    if dtype.itemsize == 2:
        # Neighbouring numbers of 16-bit floats, from those around one: a linear range would round to equal values.
        lowest = 0x3F80 - min(shape[-1] // 2, 0x3000)
        return (lowest + numbers % 0x7000).to(torch.int16).view(dtype)
    return (numbers / shape[-1] * 8 - 4).to(dtype)


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(0.0) if value.dtype.is_floating_point else value


def _expert_range(op: GeOp) -> tuple[int, int]:
    first, last = op.attrs.get("active_expert_range") or (0, op.attrs.get("expert_num", 1))
    return int(first), int(last)


Legal = Callable[[GeOp, torch.Tensor, Tensors, torch.Generator], torch.Tensor]


def _gather_index(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    axis = int(recorded["axis"].flatten()[0]) if "axis" in recorded else int(op.attrs.get("dim", 0))
    return torch.randint(0, recorded["x"].shape[axis], tuple(value.shape), generator=generator)


def _rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different rows of the pool: writing one twice is undefined."""
    pool = recorded["var"] if "var" in recorded else recorded["key_cache"].flatten(0, 1)
    if value.numel() > pool.shape[0]:
        return value
    return torch.randperm(pool.shape[0], generator=generator)[: value.numel()].reshape(value.shape)


def _experts(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different experts for the choices of a token."""
    first, last = _expert_range(op)
    if last - first < value.shape[1]:
        return value
    return torch.stack([first + torch.randperm(last - first, generator=generator)[: value.shape[1]] for _ in range(value.shape[0])])


def _groups(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    rows = (recorded["x0"] if "x0" in recorded else recorded["x"]).shape[0]
    counts = torch.randint(0, len(value), (rows * 3 // 4,), generator=generator).bincount(minlength=len(value))
    return counts.cumsum(0) if op.attrs.get("group_list_type", 0) == 0 else counts


def _routed_rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(value.numel(), generator=generator)


_INDICES: Mapping[tuple[str, str], Legal] = {
    ("GatherV2", "indices"): _gather_index,
    ("GatherElements", "index"): _gather_index,
    ("ScatterNdUpdate", "indices"): _rows,
    ("ScatterPaKvCache", "slot_mapping"): _rows,
    ("MoeInitRoutingV3", "expert_idx"): _experts,
    ("GroupedMatmul", "group_list"): _groups,
    ("GroupedMatmulSwigluQuantV2", "group_list"): _groups,
    ("MoeFinalizeRoutingV2", "expanded_row_idx"): _routed_rows,
}
