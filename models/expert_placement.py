"""Physical experts: which rank holds which experts, and how often, so that busy ones have copies and no rank has all of them.

A router chooses among the logical experts of a model. Ranks hold physical ones, in any order and some more than once; a table on each
rank says which physical expert serves a logical one. Weights and tables are data: graphs know only how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..graphs import tree
from ..graphs.spmd.layout import num_shards
from ..graphs.types import Aval, Tree
from .params import EXPERTS, Param, Physical, Source

TABLE, TABLES = "physical_ids", "physical_ids_of_all"
"""Keys among the parameters of a mixture of experts: of a rank's own table, and of all ranks', by which a rank routes all tokens."""
_ROUTER, _EXPERTS = "router", ("gate_up", "down")

Layer = tuple[int, ...]
"""The logical expert of each physical one."""


class PhysicalExperts(Protocol):
    """How many physical experts there are; `models.variant.Variant` is one."""

    @property
    def physical_experts(self) -> int: ...
    @property
    def expert_ranks(self) -> int: ...


class ExpertSizes(Protocol):
    """Fields of a model's configuration that are read here."""

    @property
    def num_experts(self) -> int: ...
    @property
    def variant(self) -> PhysicalExperts: ...


class PlacedModel(Protocol):
    """What is read here of `models.step.Model`."""

    def params(self, dtype: torch.dtype) -> Tree:
        """Tree of Param."""
        ...


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts that ranks hold.

    Attributes:
        layers: of each layer with experts, in their order; then of the draft head's layer, where it has some and is not placed by default.
    """

    layers: tuple[Layer, ...]

    @staticmethod
    def recorded(model: Mapping[str, Any]) -> ExpertPlacement | None:
        """That of `Manifest.model`; None where an artifact has none."""
        layers = model.get("expert_map")
        return layers and ExpertPlacement(tuple(map(tuple, layers)))

    def as_fields(self) -> list[list[int]]:
        """As `Manifest.model` has it."""
        return [list(layer) for layer in self.layers]


def with_experts(model: PlacedModel) -> tuple[list[bool], bool]:
    """Which layers of a model have experts, and whether the layer of its draft head, if its programs draft, has."""
    params = model.params(torch.float32)

    def has(part: Tree) -> bool:
        return any(_ROUTER in path.split(".") for path, _ in tree.flatten(part))

    return [has(layer) for layer in params["layers"]], has({name: part for name, part in params.items() if name != "layers"})


def count(cfg: ExpertSizes) -> int:
    """Physical experts of a layer, 0 in a dense model."""
    return cfg.variant.physical_experts or cfg.num_experts


def by_default(physical: int, logical: int) -> Layer:
    """The placement of a layer that no map has, as SGLang's trivial one: all in order, and again from the first."""
    return tuple(index % logical for index in range(physical))


def tables(layer: Layer, logical: int, ranks: int) -> list[list[int]]:
    """For each rank the physical expert that serves each logical one: its own copy, or else one of them, each for equally many ranks.

    That is the rule of SGLang (srt/eplb/expert_location.py), which draws where this counts on from another copy for each expert.
    """
    share, copies = len(layer) // ranks, [list[int]() for _ in range(logical)]
    for physical, expert in enumerate(layer):
        copies[expert].append(physical)
    chosen = [[-1] * logical for _ in range(ranks)]
    for expert, places in enumerate(copies):
        for physical in reversed(places):
            chosen[physical // share][expert] = physical
        without = [rank for rank in range(ranks) if chosen[rank][expert] < 0]
        for position, rank in enumerate(without):
            chosen[rank][expert] = places[(position + expert) % len(places)]
    return chosen


def placed(params: Tree, storage: PhysicalExperts, placement: ExpertPlacement | None) -> Tree:
    """A tree of stored Param whose experts are physical ones, with a table beside each router.

    Layers that the placement does not have, all where it is None, are placed by default.
    """
    if not storage.physical_experts:
        return params
    rows: Iterator[Layer | None] = itertools.chain(placement.layers if placement else (), itertools.repeat(None))

    def walk(node: Tree) -> Tree:
        if isinstance(node, Mapping):
            if _ROUTER in node:
                return _block(node, next(rows), storage)
            return {name: walk(value) for name, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    return walk(params)


def _block(block: Mapping[str, Any], layer: Layer | None, storage: PhysicalExperts) -> dict[str, Tree]:
    logical, ranks = block[_ROUTER].aval.shape[0], storage.expert_ranks
    layer = layer or by_default(storage.physical_experts, logical)

    def table() -> torch.Tensor:
        return torch.tensor(tables(layer, logical, ranks), dtype=torch.int32)

    def each(value: Tree) -> Tree:
        if isinstance(value, Mapping):
            return {name: each(part) for name, part in value.items()}
        return _expanded(value, layer, logical)

    # Each rank has its own row, along the axis that spreads the experts, and all rows: gathering them would be work on weights in a step.
    rows = {
        name: Param(Aval((ranks, logical), torch.int32, (axis, None)), Source((), (), table, lambda tensor: ()))
        for name, axis in ((TABLE, EXPERTS), (TABLES, None))
    }
    return {**rows, **{name: each(value) if name in _EXPERTS else value for name, value in block.items()}}


def _expanded(param: Param, layer: Layer, logical: int) -> Param:
    """A parameter of all logical experts -> the same of physical ones."""
    aval, source, dim = param.aval, param.source, param.aval.axes.index(EXPERTS)
    axes = tuple(tuple(Physical(layer) if axis == EXPERTS else axis for axis in axes) for axes in param.source_axes)
    firsts = torch.tensor([layer.index(expert) for expert in range(logical)])

    def split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return source.split(tensor.index_select(dim, firsts))

    shape = (*aval.shape[:dim], len(layer), *aval.shape[dim + 1 :])
    return replace(param, aval=replace(aval, shape=shape), source=replace(source, axes=axes, split=split))


def physical(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Physical experts of logical ones [T, X]; inside a region.

    Args:
        table: this device's [1, E], or those of all devices, whose tokens come in their order.
    """
    if num_shards(EXPERTS) == 1:
        # One device that stands for all takes the copies of the first.
        table = table[:1] if table.shape[0] > 1 else table
    rows, flat = table.shape[0], ids
    if rows > 1:
        first = torch.arange(rows, dtype=ids.dtype, device=ids.device) * table.shape[1]
        flat = ids.view(rows, -1) + first[:, None]
    return table.view(-1).index_select(0, flat.reshape(-1)).view(ids.shape)


def physical_count(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """`Variant.physical_experts` of a model whose parameters have these paths and shapes."""
    named: Sequence[tuple[list[str], tuple[int, ...]]] = [(path.split("."), shape) for path, shape in shapes]
    block = next((path[:-1] for path, _ in named if path[-1] == TABLE), None)
    if block is None:
        return 0
    # The first dimension of the weight counts experts, in whatever format it is stored.
    weights = ([*block, _EXPERTS[1]], [*block, _EXPERTS[1], "weight"])
    return next(shape[0] for path, shape in named if path in weights)


def small(cfg: ExpertSizes, large: ExpertSizes, layers: int) -> tuple[int, ExpertPlacement | None]:
    """`Variant.physical_experts` of a small model that stands for a large one (shrink.py), and a placement that moves all; 0 without one.

    Where the large one has copies, each rank of the small one has one.
    """
    if not large.variant.physical_experts:
        return 0, None
    ranks = large.variant.expert_ranks
    physical = -(-cfg.num_experts // ranks) * ranks + ranks * (large.variant.physical_experts > large.num_experts)
    layer = by_default(physical, cfg.num_experts)[::-1]
    return physical, ExpertPlacement(tuple(layer[turn % physical :] + layer[: turn % physical] for turn in range(layers)))
