"""Products with a weight in whatever format it is stored: models multiply by these, and never ask for the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...graphs import ops, tree
from ...graphs.spmd.region import Sum, shard_map
from ...graphs.types import Tree
from .formats import FLOAT, W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC
from .leaves import AXES

Axes = tuple[str | None, ...]


def format_of(weight: Tree) -> str:
    """The format of a weight, by the tensors that it consists of."""
    if isinstance(weight, Mapping) and "group_scale" in weight:
        return W4A16
    if not isinstance(weight, Mapping) or "scale" not in weight:
        return FLOAT
    if "input_scale" in weight:
        return W8A8
    return W4A8_DYNAMIC if "assist" in weight else W8A8_DYNAMIC


def operands(weight: Tree, axes: Axes, *, lead: int = 0, row: bool = False) -> list[tuple[torch.Tensor, Axes]]:
    """The tensors of a weight with their logical axes, as `shard_map` reads them.

    Args:
        axes: of the float matrix `[lead..., out..., K]`.
        lead, row: as of `leaves.Matrix`.
    """
    if isinstance(weight, list):
        return [pair for part in weight for pair in operands(part, axes, lead=lead, row=row)]
    if not isinstance(weight, Mapping):
        return [(weight, axes)]
    if format_of(weight) == FLOAT and "bias" in weight:
        return [(weight["weight"], axes), (weight["bias"], axes[lead:-1])]
    return [(tensor, AXES[name](axes, lead, row, tensor)) for name, tensor in weight.items()]


def regrouped(weights: Sequence[Tree], tensors: Sequence[torch.Tensor]) -> list[Tree]:
    """Weights like others, of the tensors that `operands` listed of each, one behind the other."""
    rest = iter(tensors)
    return [rebuilt(weight, [next(rest) for _ in tree.flatten(weight)]) for weight in weights]


def rebuilt(weight: Tree, tensors: Sequence[torch.Tensor]) -> Tree:
    """A weight like another, of the tensors that `operands` listed of it."""
    if isinstance(weight, list):
        return regrouped(weight, tensors)
    return dict(zip(weight, tensors, strict=True)) if isinstance(weight, Mapping) else tensors[0]


def linear(x: torch.Tensor, weight: Tree, *, joined: bool = False) -> torch.Tensor:
    """`x @ weight.T`, [T, K] -> [T, N], of a matrix [N, K] whose contraction no layout splits; plus its bias [N] if it has one.

    Args:
        joined: whether one operation multiplies by int8 and adds the bias.
    """
    if isinstance(weight, list):
        # Parts of each group of rows lie one behind the other (parts.py).
        outs = [linear(x, _flat(part)).unflatten(-1, _groups(part)) for part in weight]
        return torch.cat(outs, -1).flatten(-2)
    if not isinstance(weight, Mapping):
        plain: torch.Tensor = ops.linear(x, weight)
        return plain
    tensors = [tensor for name, tensor in weight.items() if name != "bias"]
    if joined and "bias" in weight and format_of(weight) == W8A8_DYNAMIC:
        biased: torch.Tensor = ops.quant_linear_biased(x, *tensors, weight["bias"])
        return biased
    out: torch.Tensor = _PRODUCTS[format_of(weight)](x, *tensors)
    return out + weight["bias"] if "bias" in weight else out


def swiglu(x: torch.Tensor, weight: Tree, axis: str) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, [T, M] -> [T, F], of a matrix [2, F, M].

    Args:
        x: all of it on every device.
        axis: logical axis of F.
    """
    if isinstance(weight, torch.Tensor):
        plain: torch.Tensor = ops.swiglu_linear(x, weight)
        return plain

    def local(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return local_swiglu(x, rebuilt(weight, tensors))

    return shard_map(local, [(x, (None, None)), *operands(weight, (None, axis, None))], (None, axis))


def local_swiglu(x: torch.Tensor, weight: Tree) -> torch.Tensor:
    """`swiglu` of a device's own part, inside a region."""
    if isinstance(weight, torch.Tensor):
        plain: torch.Tensor = ops.swiglu_linear(x, weight)
        return plain
    gated: torch.Tensor = ops.swiglu(linear(x, _flat(weight)))
    return gated


def _flat(weight: Tree) -> Tree:
    """A weight whose two dimensions of channels, such as gate and up, are one, as products know it."""
    if not isinstance(weight, Mapping):
        return weight if isinstance(weight, list) else weight.flatten(0, 1)
    # They are the last of a matrix of integers.
    first = 0 if format_of(weight) == FLOAT else -2
    return {name: tensor.flatten(first, first + 1) if tensor.dim() > 1 else tensor for name, tensor in weight.items()}


def _groups(part: Tree) -> tuple[int, int]:
    """Groups of rows of a part of a matrix, and the rows of it in each."""
    if not isinstance(part, Mapping):
        groups, rows = part.shape[:2]
    else:
        groups, rows = next(part[name] for name in ("scale", "group_scale", "bias") if name in part).shape[-2:]
    return int(groups), int(rows)


def row_parallel(x: torch.Tensor, weight: Tree, axis: str, rows: str | None = None) -> torch.Tensor:
    """`x @ weight.T`, [T, K] -> [T, N], of a matrix [N, K] whose contraction may be split: then a partial sum.

    Each device rounds its own part of x, as serving stacks do. The whole product on one device rounds the same parts.

    Args:
        axis: logical axis of K.
        rows: logical axis of T where it is that which is split; K then is whole.
    """
    if not isinstance(weight, Mapping):
        plain: torch.Tensor = ops.linear(x, weight)
        return plain

    def local(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return local_row_parallel(x, rebuilt(weight, tensors))

    result = (rows, None) if rows else Sum(axis)
    return shard_map(local, [(x, (rows, axis)), *operands(weight, (None, axis), row=True)], result)


def local_row_parallel(x: torch.Tensor, weight: Tree) -> torch.Tensor:
    """`row_parallel` of a device's own part, inside a region."""
    if not isinstance(weight, Mapping):
        plain: torch.Tensor = ops.linear(x, weight)
        return plain
    parts = split_parts(weight, 0)
    total = linear(x[..., : x.shape[-1] // len(parts)], parts[0])
    for part, rows in zip(parts[1:], x.chunk(len(parts), -1)[1:], strict=True):
        total = total + linear(rows, part)
    return total


def split_parts(weight: Mapping[str, torch.Tensor], dim: int) -> list[dict[str, torch.Tensor]]:
    """The parts of the contraction of a weight that ranks would share, each a weight of its own.

    Args:
        dim: of the contraction in the integers.
    """
    if format_of(weight) == W4A16:
        # Nothing of the activations is rounded: ranks that share a contraction multiply what one device does.
        return [dict(weight)]
    name = "scale" if "assist" not in weight else "assist"
    count = len(weight[name])

    def part(name: str, tensor: torch.Tensor, index: int) -> torch.Tensor:
        if name.startswith("input_"):
            return tensor
        if name == "weight" or (name == "scale" and "assist" in weight):
            return tensor.narrow(dim, index * (tensor.shape[dim] // count), tensor.shape[dim] // count) if count > 1 else tensor
        return tensor[index]

    return [{name: part(name, tensor, index) for name, tensor in weight.items()} for index in range(count)]


_PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {
    FLOAT: ops.linear,
    W8A8_DYNAMIC: ops.quant_linear,
    W8A8: ops.static_quant_linear,
    W4A8_DYNAMIC: ops.quant_linear_w4a8,
    W4A16: ops.weight_quant_linear,
}
