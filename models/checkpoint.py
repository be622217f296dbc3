"""Reading the parameters of a model, or a rank's shards of them, from a Hugging Face checkpoint, and writing them to one."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..graphs import tree
from ..graphs.errors import CheckpointError
from ..graphs.types import Tree
from .block_scales import with_block_scales
from .decoder import EMBEDDING, HEAD
from .params import Param, Picked, Source
from .quant import unread_tensors
from .quant.description import canonical
from .safetensors_files import SINGLE, STORED_DTYPES, CheckpointFiles, TensorEntry, digest, open_checkpoint
from .slices import WHOLE, Region, Shard, block_ranges, boxes, narrowed, region_shape, remaining_slice, sliced_axes, source_region
from .tied_head import same_values

__all__ = ["CheckpointFiles", "ParamReader", "digest", "holds_any", "load", "open_checkpoint", "save"]

PER_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused matrices of experts -> the matrices of one expert that they consist of, one behind the other."""

_MAX_NAMES = 5
BLOCK_BYTES = 16 * 1024**2
"""Source tensors are read in blocks of about this size where their `Source.block_axis` allows it."""


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that fills `region` of a source tensor; it may lack leading dimensions, of which the region has one element."""

    name: str
    shape: tuple[int, ...]
    region: tuple[slice, ...]
    dtypes: tuple[str, ...]
    first_rows: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor on disk has the rows and columns that are read."""
        return shape == self.shape or (self.first_rows and shape[1:] == self.shape[1:] and shape[0] >= self.shape[0])


@dataclass(frozen=True)
class _Recipe:
    """A parameter and, for each tensor of its source, the pieces on disk."""

    param: Param
    sources: tuple[tuple[_Piece, ...], ...]

    @property
    def pieces(self) -> Iterable[_Piece]:
        return (piece for pieces in self.sources for piece in pieces)


@dataclass(frozen=True)
class _GroupParts:
    """What is read of a group for one shard.

    Attributes:
        recipe: of the first parameter; the others are made from the same tensors.
        sliced: the axes along which these tensors are sliced.
        regions: what is read of each of them.
    """

    recipe: _Recipe
    params: tuple[Param, ...]
    shard: Shard
    sliced: frozenset[str]
    regions: tuple[Region, ...]

    def joined(self, sources: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The parameters in order, each made from what was read, and sliced along the axes that its source tensors are not."""
        together: dict[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = {}
        for param in self.params:
            join, place = param.source.join, remaining_slice(param.aval, self.shard, self.sliced)
            if isinstance(join, Picked):
                if join.together not in together:
                    together[join.together] = join.together(*sources)
                yield together[join.together][join.index][place]
            else:
                yield join(*sources)[place]


class ParamReader:
    """Reads the parameters of a model from a checkpoint, in groups that are made from the same tensors on disk.

    Names may have the prefixes `model.`, `model.language_model.`, `language_model.model.` or none; a mixture of experts may be stored fused
    (`experts.gate_up_proj`) or expert by expert (`experts.0.gate_proj.weight`); FP8 with its scales is read as floats. Tensors of
    parts that `params` leaves out (vision tower, draft head) are not read, but a tensor of a layer that no parameter reads is an error.

    Args:
        params: tree of Param.

    Attributes:
        groups: positions of parameters in the flattened tree that are made from the same tensors in the same slices; each position is
            in one group.

    Raises:
        CheckpointError: naming the tensors that are missing, misshapen, quantised or unused, or floats where static scales of activations
            are needed, before any parameter is read.
    """

    def __init__(self, checkpoint: CheckpointFiles, params: Tree) -> None:
        self._table = _canonical(with_block_scales(checkpoint))
        self._recipes = [_recipe(param, self._table) for _, param in tree.flatten(params)]
        _check_calibrated(checkpoint, self._recipes)
        _check(checkpoint, self._table, self._recipes)
        groups: dict[Hashable, list[int]] = {}
        for position, recipe in enumerate(self._recipes):
            source = recipe.param.source
            groups.setdefault((source.names, source.shapes, recipe.param.source_axes, source.block_axis), []).append(position)
        self.groups = tuple(map(tuple, groups.values()))

    def read(self, group: Iterable[int], shard: Shard = WHOLE) -> Iterator[tuple[int, torch.Tensor]]:
        """Reads the tensors of a group once; yields (position, a rank's shard of the parameter), contiguous and in its Param's dtype.

        Where the parameters declare the axes of their source tensors, only the rank's slices of these are read. At any time only what was
        read and one parameter are in memory, if the caller keeps none; of parameters with a `block_axis` all of the group and one block.

        Args:
            group: positions of one group, or some of them.
            shard: whose shard; by default the whole parameters.

        Raises:
            CheckpointError: a file changed since it was opened.
            PartitionError: a parameter does not divide by the ranks.
        """
        positions = tuple(group)
        parts = self._parts_of(positions, shard)
        block_axis, item_bytes = parts.recipe.param.source.block_axis, _item_bytes(parts.recipe, self._table)
        blocks = block_ranges(parts.regions, item_bytes, BLOCK_BYTES) if block_axis else []
        if block_axis and len(blocks) > 1:
            shards = self._read_blocks(parts, blocks, block_axis)
            yield from ((position, shards.pop(0)) for position in positions)
            return
        sources = self._read_sources(parts.recipe, parts.regions)
        joined = parts.joined(sources)
        for position, param in zip(positions, parts.params, strict=True):
            # Cast to the stored dtype; a parameter that is its source tensor as it stands is not copied.
            yield position, next(joined).to(param.aval.dtype).expand(shard.shape(param.aval)).contiguous()

    def _parts_of(self, positions: tuple[int, ...], shard: Shard) -> _GroupParts:
        recipe, params = self._recipes[positions[0]], tuple(self._recipes[position].param for position in positions)
        sliced = sliced_axes(params, shard)
        axes = zip(recipe.param.source.shapes, recipe.param.source_axes, strict=True)
        return _GroupParts(recipe, params, shard, sliced, tuple(source_region(shape, names, shard, sliced) for shape, names in axes))

    def _read_blocks(self, parts: _GroupParts, blocks: Iterable[tuple[int, int]], axis: str) -> list[torch.Tensor]:
        shards = [torch.empty(parts.shard.shape(param.aval), dtype=param.aval.dtype) for param in parts.params]
        for begin, end in blocks:
            sources = self._read_sources(parts.recipe, [narrowed(region, begin, end) for region in parts.regions])
            for param, tensor, block in zip(parts.params, shards, parts.joined(sources), strict=True):
                tensor.narrow(param.aval.axes.index(axis), begin, end - begin).copy_(block)
            del sources, block  # frees them before the next block is read
        return shards

    def _read_sources(self, recipe: _Recipe, regions: Iterable[Region]) -> list[torch.Tensor]:
        return [_assemble(region, pieces, self._table) for region, pieces in zip(regions, recipe.sources, strict=True)]


def holds_any(checkpoint: CheckpointFiles, params: Tree) -> bool:
    """Whether a checkpoint has any tensor that a tree of Param is made from."""
    table = _canonical(checkpoint)
    return any(piece.name in table for _, param in tree.flatten(params) for piece in _recipe(param, table).pieces)


def load(checkpoint: CheckpointFiles, params: Tree) -> Tree:
    """All tensors of a tree of Param, each in its Param's dtype; what is accepted and raised: `ParamReader`."""
    reader = ParamReader(checkpoint, params)
    tensors = dict(pair for group in reader.groups for pair in reader.read(group))
    return tree.unflatten(params, (tensors[position] for position in range(len(tensors))))


def save(params: Tree, tensors: Tree, directory: str | Path) -> Path:
    """Writes tensors to `model.safetensors` under their Hugging Face names; equal tensors give equal bytes.

    Args:
        params: tree of Param.
        tensors: tree of tensors of the same structure; each is written in its own dtype.
        directory: created when absent. An older model.safetensors is replaced atomically.

    Returns:
        The file's path.

    Raises:
        CheckpointError: when the shape of a tensor differs from its Param's.
    """
    named: dict[str, torch.Tensor] = {}
    for (path, param), tensor in zip(tree.flatten(params), (leaf for _, leaf in tree.flatten(tensors)), strict=True):
        if tuple(tensor.shape) != param.aval.shape:
            raise CheckpointError(f"{path}: is {list(tensor.shape)}; its parameter is {list(param.aval.shape)}")
        if param.source.first_rows:
            continue
        parts = param.source.split(tensor.detach())
        named.update((name, part.contiguous()) for name, part in zip(param.source.names, parts, strict=True))
    file = Path(directory) / SINGLE
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{SINGLE}.{os.getpid()}")
    try:
        save_file(named, partial, metadata={"format": "pt"})
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _canonical(checkpoint: CheckpointFiles) -> dict[str, TensorEntry]:
    """Tensors on disk by the name that a Param's source uses."""
    table: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        if (known := canonical(name)) in table:
            raise CheckpointError(f"{checkpoint.directory}: {table[known].name} and {name} are both {known}; expected one of them")
        table[known] = entry
    return table


def _recipe(param: Param, table: Mapping[str, TensorEntry]) -> _Recipe:
    source = param.source
    names = enumerate(zip(found_names(source, table), source.shapes, strict=True))
    return _Recipe(
        param, tuple(_pieces(name, shape, source.legal_dtypes(index), table, source.first_rows) for index, (name, shape) in names)
    )


def found_names(source: Source, table: Container[str]) -> tuple[str, ...]:
    """The tensors that a source is read from: `Source.instead` where the checkpoint has these, and none of `Source.names`."""
    return source.instead if source.instead and not any(name in table for name in source.names) else source.names


def _pieces(
    name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], table: Mapping[str, TensorEntry], first_rows: bool
) -> tuple[_Piece, ...]:
    experts, _, leaf = name.partition(".experts.")
    fused, _, kind = leaf.partition(".")
    parts = PER_EXPERT.get(fused, ())
    if name in table or not any(f"{experts}.experts.0.{part}.{kind or 'weight'}" in table for part in parts):
        return (_Piece(name, shape, tuple(slice(0, size) for size in shape), dtypes, first_rows),)
    count, rows = shape[0], shape[1] // len(parts)
    return tuple(
        _Piece(
            f"{experts}.experts.{expert}.{part}.{kind or 'weight'}",
            (rows, *shape[2:]),
            (slice(expert, expert + 1), slice(i * rows, (i + 1) * rows), *(slice(0, size) for size in shape[2:])),
            dtypes,
        )
        for expert in range(count)
        for i, part in enumerate(parts)
    )


def _check_calibrated(checkpoint: CheckpointFiles, recipes: list[_Recipe]) -> None:
    names = list(dict.fromkeys(recipe.param.source.names[0] for recipe in recipes if recipe.param.source.uncalibrated))
    if names:
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.directory}: {names[0]}{more}: the model multiplies by static scales of activations (W8A8), which floats do not "
            "have; legal are checkpoints that ModelSlim or `npucompile quantize CHECKPOINT --static PATTERN --calibrate FILE` wrote, "
            "and formats whose scales are dynamic"
        )


def _check(checkpoint: CheckpointFiles, table: Mapping[str, TensorEntry], recipes: list[_Recipe]) -> None:
    pieces = [piece for recipe in recipes for piece in recipe.pieces]
    pairs = [(piece, table[piece.name]) for piece in pieces if piece.name in table]
    used = {piece.name for piece in pieces}
    unread = _unread(checkpoint, table, recipes, used)
    problems = (
        (
            "has the wrong dtype",
            [f"{e.name} ({e.dtype}; expected {' or '.join(p.dtypes)})" for p, e in pairs if e.dtype not in p.dtypes],
        ),
        (_MISSING, [f"{p.name} (expected {list(p.shape)})" for p in pieces if p.name not in table]),
        ("has a wrong shape", [f"{e.name} (found {list(e.shape)}, expected {list(p.shape)})" for p, e in pairs if not p.fits(e.shape)]),
        (
            "is not part of the model",
            [table[name].name for name in unread if unread_tensors.reason(name, used) is None],
        ),
    )
    for problem, found in problems:
        # The parts of a weight share their sources.
        if names := list(dict.fromkeys(found)):
            more = f"; so with {len(names) - 1} more: {', '.join(names[1 : 1 + _MAX_NAMES])}" if len(names) > 1 else ""
            if problem == _MISSING and _beginning(names[0].split()[0]) not in map(_beginning, table):
                there = list(dict.fromkeys(map(_beginning, checkpoint.tensors)))
                more += f"; names there begin with {', '.join(there[:_MAX_NAMES])}"
            others = {prefix: place for prefix, place in checkpoint.others.items() if names[0].startswith(prefix)}
            prefix, directory = next(iter(others.items()), ("", checkpoint.directory))
            raise CheckpointError(f"{directory}: tensor {names[0].removeprefix(prefix)} {problem}{more}")
    zeros = [table[name] for name in unread if unread_tensors.must_be_zero(name, used)]
    unread_tensors.check_zeros(checkpoint.directory, zeros)
    if HEAD in table and HEAD not in used and EMBEDDING in used and not same_values(table[HEAD], table[EMBEDDING]):
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {table[HEAD].name} differs from {table[EMBEDDING].name}, which is read as the output head; "
            "legal is one that is equal, and a build from this checkpoint, which reads both"
        )


_MISSING = "is missing"
_OTHER_PARTS = ("mtp.", "model.visual.", "vision_tower.", "mm_projector.")
"""What the names of parts begin with that a text model may leave out whole: a draft head, and what reads pictures."""


def _unread(checkpoint: CheckpointFiles, table: Mapping[str, TensorEntry], recipes: Iterable[_Recipe], used: Collection[str]) -> list[str]:
    """Tensors that no parameter uses, and no part that is left out has: terms that the model would silently omit."""
    named: list[str] = []
    for source in (recipe.param.source for recipe in recipes if recipe.param.source.unread):
        there = not source.unread_mark or source.unread_mark in table
        named += [name for name in source.unread if not name.endswith(".") or (there and not any(read.startswith(name) for read in used))]
    prefixes = ("model.layers.", "model.norm.", "model.visual.", "mtp.", *checkpoint.others)
    complete = tuple(prefix for prefix in prefixes if any(name.startswith(prefix) for name in used))
    # Who reads the embedding reads a whole model.
    left_out = (*_OTHER_PARTS, *checkpoint.others) if EMBEDDING in used else ("",)
    return [
        name
        for name in table
        if name not in used and name != HEAD and (name.startswith(complete) or not name.startswith(left_out)) and not _matches(name, named)
    ]


def _beginning(name: str) -> str:
    """What the name of a tensor begins with, in front of a layer's number; a name without one."""
    return re.split(r"(?<=\.)\d+\.", name)[0]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor is one of some names, or begins with one that ends in a dot."""
    return any(name == pattern or (pattern.endswith(".") and name.startswith(pattern)) for pattern in patterns)


def _item_bytes(recipe: _Recipe, table: Mapping[str, TensorEntry]) -> int:
    return STORED_DTYPES[table[recipe.sources[0][0].name].dtype].itemsize if recipe.sources else 1


def _assemble(region: Region, pieces: tuple[_Piece, ...], table: Mapping[str, TensorEntry]) -> torch.Tensor:
    """What is read of one tensor of a source; pieces on disk are read straight into their places."""
    # Of a matrix in pieces some may be stored more exactly than others.
    dtypes = {STORED_DTYPES[table[piece.name].dtype] for piece in pieces}
    whole = torch.empty(region_shape(region), dtype=functools.reduce(torch.promote_types, dtypes))
    for source, target in boxes(region):
        for piece in pieces:
            if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(source, piece.region, strict=True)):
                _read_piece(whole, source, target, piece, table[piece.name])
    return whole


def _read_piece(whole: torch.Tensor, source: tuple[slice, ...], target: tuple[slice, ...], piece: _Piece, entry: TensorEntry) -> None:
    """Reads the part of a piece that lies in a box: `source` in the source tensor, `target` in `whole`."""
    common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(source, piece.region, strict=True)]
    place = whole[tuple(_moved(part, to.start - at.start) for part, at, to in zip(common, source, target, strict=True))]
    lacking = len(piece.region) - len(entry.shape)
    region = [_moved(part, -at.start) for part, at in zip(common, piece.region, strict=True)][lacking:]
    place = place[(0,) * lacking]
    if place.is_contiguous() and STORED_DTYPES[entry.dtype] == whole.dtype:
        entry.read_into(place, region)
    else:
        place.copy_(entry.read_slice(region))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
