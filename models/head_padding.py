"""Heads that ranks cannot share evenly: heads of zeros stand between and behind them until they can.

The rows of a padded head are zeros in the matrices that make it, as are its columns in the one that reads it, so that it adds nothing to
any output. Its own numbers stay finite: a query of zeros attends to all keys alike, a delta rule of zeros keeps a state of zeros. Programs
are built from a configuration with the padded numbers (`widened`); the declared sources are those of the real heads (`with_real_sources`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs import tree
from ..graphs.errors import PartitionError
from ..graphs.types import Tree
from .params import Members, Param, Parts, Placed, Repeated, SourceAxis, axis_name

QUERIES, KEYS, DELTA = "q_heads", "kv_heads", "delta_heads"
"""Kinds of heads, by the logical axes along which ranks share them."""

FOLLOWING = {"linear_num_key_heads": "linear_num_value_heads"}
"""Field of a number of heads -> field of a number of other heads, of which each of those has as many as any other."""

TITLES = {QUERIES: "query heads", KEYS: "key-value heads", DELTA: "key heads of the delta rule"}


@dataclass(frozen=True)
class PaddedHeads:
    """Heads of one kind.

    Attributes:
        kind: QUERIES, KEYS or DELTA.
        real: how many there are.
        places: for each padded head, in order, which of them it is; -1 for one of zeros.
        fields: (field of a configuration, padded number).
        ranks: that share them.
    """

    kind: str
    real: int
    places: tuple[int, ...]
    fields: tuple[tuple[str, int], ...]
    ranks: int

    @property
    def idle(self) -> int:
        """Ranks whose heads are all of zeros; where there are copies, ranks count as heads do."""
        share = max(1, len(self.places) // self.ranks)
        return sum(all(head < 0 for head in self.places[i : i + share]) for i in range(0, len(self.places), share))


def copies(heads: int, ranks: int) -> int:
    """Adjacent copies of each of some key-value heads, so that each of more ranks has one."""
    return next(count for count in range(max(1, ranks // heads), 0, -1) if ranks % count == 0)


def grouped(queries: int, keys: int, ranks: int) -> tuple[PaddedHeads, ...]:
    """Padding of query heads, of which each key-value head has as many, and of key-value heads.

    Each copy of a key-value head has the same number of query heads. Where those of a head do not divide among its copies, the last of its
    copies has fewer; where key-value heads do not divide among ranks, there are some of zeros behind them, with query heads of zeros.

    Raises:
        PartitionError: half of the heads, or more, would be padding.
    """
    times, per = copies(keys, ranks), queries // keys
    wide = _up(keys, ranks // times)
    each = -(-per // times) * times
    named = (("num_attention_heads", wide * each), ("num_key_value_heads", wide))
    _refuse_waste("num_attention_heads", queries, wide * each, ranks)
    places = tuple(group * per + i if group < keys and i < per else -1 for group in range(wide) for i in range(each))
    of_keys = tuple(group if group < keys else -1 for group in range(wide))
    padded = [PaddedHeads(QUERIES, queries, places, named, ranks)] if wide * each != queries else []
    return (*padded, PaddedHeads(KEYS, keys, of_keys, (), ranks)) if wide != keys else tuple(padded)


def behind(
    kind: str, field: str, real: int, ranks: int, *, following: tuple[str, int] | None = None, powers: bool = False
) -> tuple[PaddedHeads, ...]:
    """Padding of heads behind the last one.

    Args:
        field: of the configuration.
        following: another field, and its number.
        powers: whether each rank has a power of two of them.

    Raises:
        PartitionError: half of the heads, or more, would be padding.
    """
    share = -(-real // ranks)
    wide = ranks * (1 << (share - 1).bit_length() if powers else share)
    if wide == real:
        return ()
    _refuse_waste(field, real, wide, ranks)
    others = ((following[0], following[1] // real * wide),) if following else ()
    return (PaddedHeads(kind, real, tuple(i if i < real else -1 for i in range(wide)), ((field, wide), *others), ranks),)


def heads_of(config: Any, ranks: int, *, delta: int = 0, powers: bool = False) -> tuple[PaddedHeads, ...]:
    """Padding of the heads of a configuration; empty where ranks share them evenly.

    Args:
        ranks: that share them.
        delta: that share heads of the delta rule; 0 for as many.
        powers: whether attention over latents is for a power of two of heads a rank, as kernels of NPUs are.

    Raises:
        PartitionError: naming the field, where half of its heads, or more, would be padding, or it is none of a kind that is padded.
    """
    found: list[PaddedHeads] = []
    for name, count in config.split_heads.items():
        if name == "num_attention_heads" and _is_field(config, "num_key_value_heads"):
            found += grouped(count, config.num_key_value_heads, ranks)
        elif name == "num_attention_heads":
            found += behind(QUERIES, name, count, ranks, powers=powers)
        elif name in FOLLOWING:
            found += behind(DELTA, name, count, delta or ranks, following=(FOLLOWING[name], getattr(config, FOLLOWING[name])))
        elif count % ranks and not name.startswith("draft "):
            raise PartitionError(f"{ranks} ranks of a group cannot share {name} {count}; legal are divisors of {count}")
    return tuple(found)


def _is_field(config: Any, name: str) -> bool:
    return name in getattr(config, "__dataclass_fields__", ())


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _refuse_waste(field: str, real: int, padded: int, ranks: int) -> None:
    if padded >= 2 * real:
        raise PartitionError(
            f"{ranks} ranks of a group cannot share {field} {real}: {padded - real} of {padded} would be padding; legal are numbers of "
            f"ranks for which less than half is"
        )


def widened(config: Any) -> Any:
    """The configuration with padded numbers of heads; itself where nothing is padded. One of several models widens each.

    Raises:
        PartitionError: the width of a head follows from their number.
    """
    if hasattr(config, "widened"):
        return config.widened()
    fields = dict(field for heads in config.variant.heads for field in heads.fields)
    if not fields:
        return config
    wide = replace(config, **fields)
    if getattr(wide, "head_dim", None) != getattr(config, "head_dim", None):
        raise PartitionError(
            f"head_dim is {config.head_dim} with {config.split_heads} and {wide.head_dim} with {wide.split_heads}; heads are padded where "
            "their width is a field of its own"
        )
    return wide


def with_real_sources(params: Tree, padded: tuple[PaddedHeads, ...]) -> Tree:
    """A tree of Param as `widened` declares it, whose sources are the tensors of a checkpoint, which has the real heads alone."""
    kinds = {heads.kind: heads for heads in padded}
    return tree.map_leaves(lambda param: _real(param, kinds), params) if kinds else params


def _real(param: Param, kinds: Mapping[str, PaddedHeads]) -> Param:
    source = param.source
    axes = tuple(tuple(_placed(axis, kinds) for axis in each) for each in param.source_axes)
    if not any(isinstance(axis, Placed) for each in axes for axis in each):
        return param
    shapes = tuple(
        tuple(_fewer(size, axis) for size, axis in zip(shape, each, strict=True)) for shape, each in zip(source.shapes, axes, strict=True)
    )
    # A scale that is divided by must not be zero.
    fill = 1.0 if param.init == "cache_scale" else 0.0

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        return source.join(*(_filled(*each, fill) for each in zip(tensors, shapes, axes, strict=True)))

    def split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_cut(part, each) for part, each in zip(source.split(tensor), axes, strict=True))

    own = replace(source, shapes=shapes, join=join, split=split, axes=axes, padded_from=source.padded_from or source)
    return replace(param, source=own)


def _placed(axis: SourceAxis, kinds: Mapping[str, PaddedHeads]) -> SourceAxis:
    """The dimension with the real heads; itself where those are not padded."""
    name, kind, times = axis_name(axis), axis_name(axis), 1
    units: tuple[int, ...] = (1,)
    if isinstance(axis, Members):
        kind, times = axis.kind, axis.copies
    elif isinstance(axis, Repeated):
        times = axis.copies
    if (heads := kinds.get(kind or "")) is None:
        return axis
    if isinstance(axis, Parts):
        units = tuple(size // len(heads.places) for size in axis.sizes)
    return Placed(name, heads.real, heads.places, heads.ranks, times, units)


def _fewer(size: int, axis: SourceAxis) -> int:
    return size // len(axis.places) * axis.real if isinstance(axis, Placed) else size


def _filled(tensor: torch.Tensor, shape: tuple[int, ...], axes: tuple[SourceAxis, ...], fill: float) -> torch.Tensor:
    """A whole tensor, or what a rank read of it, with heads of zeros where the parameter has them.

    Args:
        shape: of the whole. A dimension of one element is that of a scale, which has none along the matrix's dimension.
    """
    for dim, axis in enumerate(axes[: tensor.dim()]):
        if isinstance(axis, Placed) and (tensor.shape[dim] != 1 or shape[dim] == 1):
            width = shape[dim] // (axis.real * sum(axis.units))
            heads = tensor.shape[dim] // (width * sum(axis.units))
            # A rank's own come first among its places: of the copies of a head the last has fewer, and ranks behind the last head none.
            places = axis.places if heads == axis.real else (*range(heads), *[-1] * (axis.share - heads))
            parts = tensor.split([heads * unit * width for unit in axis.units], dim)
            filled = [_spread(part, dim, places, unit * width, fill) for part, unit in zip(parts, axis.units, strict=True)]
            tensor = filled[0] if len(filled) == 1 else torch.cat(filled, dim)
    return tensor


def _spread(tensor: torch.Tensor, dim: int, places: tuple[int, ...], width: int, fill: float) -> torch.Tensor:
    """Heads of `width` along a dimension at their places."""
    shape = [len(places), width]
    out = tensor.new_full((*tensor.shape[:dim], *shape, *tensor.shape[dim + 1 :]), fill)
    at = torch.tensor([place for place, head in enumerate(places) if head >= 0], dtype=torch.int64, device=tensor.device)
    return out.index_copy_(dim, at, tensor.unflatten(dim, (-1, width))).flatten(dim, dim + 1) if len(at) else out.flatten(dim, dim + 1)


def _cut(tensor: torch.Tensor, axes: tuple[SourceAxis, ...]) -> torch.Tensor:
    """The real heads of a tensor that has all places."""
    for dim, axis in enumerate(axes):
        # A bias goes through its matrix's source as one column.
        if isinstance(axis, Placed) and (tensor.shape[dim] != 1 or len(axis.places) == 1):
            kept = torch.tensor([place for place, head in enumerate(axis.places) if head >= 0], device=tensor.device)
            width = tensor.shape[dim] // (len(axis.places) * sum(axis.units))
            parts = tensor.split([len(axis.places) * unit * width for unit in axis.units], dim)
            heads = [part.unflatten(dim, (len(axis.places), -1)).index_select(dim, kept).flatten(dim, dim + 1) for part in parts]
            tensor = torch.cat(heads, dim)
    return tensor
