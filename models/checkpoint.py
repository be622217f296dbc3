"""Reading the parameters of a model from a Hugging Face checkpoint, a few tensors at a time, and writing them to one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..graphs import tree
from ..graphs.errors import CheckpointError
from ..graphs.types import Tree
from .params import Param
from .safetensors_files import DTYPES, SINGLE, Checkpoint, TensorEntry, digest, open_checkpoint

__all__ = ["Checkpoint", "ParamReader", "digest", "load", "open_checkpoint", "save"]

_PREFIXES = (("model.language_model.", "model."), *((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm.")))
_PER_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MAX_NAMES = 5


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that fills `region` of a source tensor: all of it when `region` is ()."""

    name: str
    shape: tuple[int, ...]
    region: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class _Recipe:
    """A parameter and, for each tensor of its source, the pieces on disk."""

    param: Param
    sources: tuple[tuple[_Piece, ...], ...]

    @property
    def pieces(self) -> Iterable[_Piece]:
        return (piece for pieces in self.sources for piece in pieces)


class ParamReader:
    """Reads the parameters of a model from a checkpoint, in groups that are made from the same tensors on disk.

    Names may carry the prefixes `model.`, `model.language_model.` or none; a mixture of experts may be stored fused
    (`experts.gate_up_proj`) or expert by expert (`experts.0.gate_proj.weight`). Tensors of parts that `params` leaves out
    (vision, draft head) are not read, but a tensor of a layer that no parameter reads is an error.

    Args:
        params: tree of Param.

    Attributes:
        groups: positions of parameters in the flattened tree; each position is in one group.

    Raises:
        CheckpointError: naming the tensors that are missing, misshapen, quantised or unused, before anything is read.
    """

    def __init__(self, checkpoint: Checkpoint, params: Tree) -> None:
        self._table = _canonical(checkpoint)
        self._recipes = [_recipe(param, self._table) for _, param in tree.flatten(params)]
        _check(checkpoint.directory, self._table, self._recipes)
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, recipe in enumerate(self._recipes):
            groups.setdefault(recipe.param.source.names, []).append(position)
        self.groups = tuple(map(tuple, groups.values()))

    def read(self, group: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Reads the tensors of a group once; yields (position, parameter), contiguous and in its Param's dtype.

        At any time only the tensors on disk and one parameter are in memory, if the caller keeps none.

        Raises:
            CheckpointError: a file changed since it was opened.
        """
        positions = tuple(group)
        first = self._recipes[positions[0]]
        sources = [_assemble(shape, pieces, self._table) for shape, pieces in zip(first.param.source.shapes, first.sources, strict=True)]
        for position in positions:
            param = self._recipes[position].param
            # Cast to the stored dtype; a parameter that is its source tensor as it stands is not copied.
            yield position, param.source.join(*sources).to(param.aval.dtype).expand(param.aval.shape).contiguous()


def load(checkpoint: Checkpoint, params: Tree) -> Tree:
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


def _canonical(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Tensors on disk by the name that a Param's source uses."""
    table: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        canonical = next((to + name.removeprefix(prefix) for prefix, to in _PREFIXES if name.startswith(prefix)), name)
        if canonical in table:
            raise CheckpointError(f"{checkpoint.directory}: {table[canonical].name} and {name} are both {canonical}; expected one of them")
        table[canonical] = entry
    return table


def _recipe(param: Param, table: Mapping[str, TensorEntry]) -> _Recipe:
    return _Recipe(param, tuple(_pieces(*source, table) for source in zip(param.source.names, param.source.shapes, strict=True)))


def _pieces(name: str, shape: tuple[int, ...], table: Mapping[str, TensorEntry]) -> tuple[_Piece, ...]:
    prefix, _, leaf = name.rpartition(".")
    parts = _PER_EXPERT.get(leaf, ()) if prefix.endswith(".experts") else ()
    if name in table or not any(f"{prefix}.0.{part}.weight" in table for part in parts):
        return (_Piece(name, shape),)
    experts, rows = shape[0], shape[1] // len(parts)
    return tuple(
        _Piece(f"{prefix}.{expert}.{part}.weight", (rows, *shape[2:]), (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(experts)
        for i, part in enumerate(parts)
    )


def _check(directory: Path, table: Mapping[str, TensorEntry], recipes: list[_Recipe]) -> None:
    pieces = [piece for recipe in recipes for piece in recipe.pieces]
    pairs = [(piece, table[piece.name]) for piece in pieces if piece.name in table]
    used = {piece.name for piece in pieces}
    # A tensor of a layer or of the draft head that no parameter uses is a term that the model would silently omit.
    complete = tuple(prefix for prefix in ("model.layers.", "mtp.") if any(name.startswith(prefix) for name in used))
    legal = ", ".join(DTYPES)
    problems = (
        ("has a quantised dtype", [f"{e.name} ({e.dtype}; supported are {legal})" for _, e in pairs if e.dtype not in DTYPES]),
        ("is missing", [f"{p.name} (expected {list(p.shape)})" for p in pieces if p.name not in table]),
        ("has a wrong shape", [f"{e.name} (found {list(e.shape)}, expected {list(p.shape)})" for p, e in pairs if e.shape != p.shape]),
        ("is not part of the model", [entry.name for name, entry in table.items() if name.startswith(complete) and name not in used]),
    )
    for problem, names in problems:
        if names:
            more = f"; so with {len(names) - 1} more: {', '.join(names[1 : 1 + _MAX_NAMES])}" if len(names) > 1 else ""
            raise CheckpointError(f"{directory}: tensor {names[0]} {problem}{more}")


def _assemble(shape: tuple[int, ...], pieces: tuple[_Piece, ...], table: Mapping[str, TensorEntry]) -> torch.Tensor:
    """One tensor of a source; its pieces are read straight into their regions."""
    if pieces[0].region == ():
        return table[pieces[0].name].read()
    whole = torch.empty(shape, dtype=DTYPES[table[pieces[0].name].dtype])
    for piece in pieces:
        region, entry = whole[piece.region], table[piece.name]
        if DTYPES[entry.dtype] == whole.dtype:
            entry.read_into(region)
        else:
            region.copy_(entry.read())
    return whole
