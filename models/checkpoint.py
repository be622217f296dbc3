"""Turns a checkpoint into the tensors of a tree of Param, and such tensors into a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..graphs import tree
from ..graphs.errors import CheckpointError
from ..graphs.types import Tree
from .params import Param
from .safetensors_files import SINGLE, Checkpoint, TensorEntry, digest, open_checkpoint

__all__ = ["Checkpoint", "digest", "load", "open_checkpoint", "save"]

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read), whenever a tensor has been read."""

LOADABLE = ("F32", "BF16", "F16", "F64")
"""Codes of the dtypes that are numbers as they stand; every other one needs scales, or is not a weight."""

_PREFIXES = (("model.language_model.", "model."), *((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm.")))
_PER_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MOST_OTHERS = 5


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that fills part of a source tensor: all of it when `place` is ()."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class _Recipe:
    """A parameter and, for each tensor of its source, the pieces on disk."""

    param: Param
    sources: tuple[tuple[_Piece, ...], ...]

    @property
    def pieces(self) -> Iterable[_Piece]:
        return (piece for pieces in self.sources for piece in pieces)


def load(checkpoint: Checkpoint, params: Tree, progress: Progress | None = None) -> Tree:
    """Tensors for a tree of Param, each in its Param's dtype and memory of its own.

    Names may carry the prefixes `model.`, `model.language_model.` or none; a mixture of experts may be stored fused
    (`experts.gate_up_proj`) or expert by expert (`experts.0.gate_proj.weight`). Tensors of parts that `params` leaves out
    (vision, draft head) are not read, but a tensor of a layer that no parameter reads is an error.

    Raises:
        CheckpointError: naming the tensors that are missing, misshapen, quantised or unused, before anything is read.
    """
    table = _canonical(checkpoint)
    leaves = [leaf for _, leaf in tree.flatten(params)]
    recipes = [_recipe(param, table) for param in leaves]
    _check(checkpoint.directory, table, recipes)
    total = sum(table[piece.name].nbytes for recipe in recipes for piece in recipe.pieces)
    done, tensors = 0, []
    with ExitStack() as stack:
        handles = {file: stack.enter_context(safe_open(file, "pt")) for file in checkpoint.files}
        for recipe in recipes:
            tensors.append(_read(recipe, table, handles))
            done += sum(table[piece.name].nbytes for piece in recipe.pieces)
            if progress is not None:
                progress(done, total)
    return tree.unflatten(params, tensors)


def save(params: Tree, tensors: Tree, directory: str | Path) -> Path:
    """Writes tensors to `model.safetensors` under their Hugging Face names; equal tensors give equal bytes.

    Args:
        params: tree of Param.
        tensors: tree of tensors of the same structure; each is written in its own dtype.
        directory: made when absent. An older model.safetensors is replaced in one step.

    Returns:
        The file.

    Raises:
        CheckpointError: when a tensor has not its Param's shape.
    """
    named: dict[str, torch.Tensor] = {}
    for (where, param), tensor in zip(tree.flatten(params), (leaf for _, leaf in tree.flatten(tensors)), strict=True):
        if tuple(tensor.shape) != param.aval.shape:
            raise CheckpointError(f"{where}: is {list(tensor.shape)}; its parameter is {list(param.aval.shape)}")
        parts = param.source.split(tensor.detach())
        named.update((name, part.contiguous()) for name, part in zip(param.source.names, parts, strict=True))
    path = Path(directory) / SINGLE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{SINGLE}.{os.getpid()}")
    try:
        save_file(named, partial, metadata={"format": "pt"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _canonical(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The table under the names that sources use."""
    table: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        ours = next((to + name.removeprefix(prefix) for prefix, to in _PREFIXES if name.startswith(prefix)), name)
        if ours in table:
            raise CheckpointError(f"{checkpoint.directory}: {table[ours].name} and {name} are both {ours}; expected one of them")
        table[ours] = entry
    return table


def _recipe(param: Param, table: Mapping[str, TensorEntry]) -> _Recipe:
    return _Recipe(param, tuple(_pieces(*source, table) for source in zip(param.source.names, param.source.shapes, strict=True)))


def _pieces(name: str, shape: tuple[int, ...], table: Mapping[str, TensorEntry]) -> tuple[_Piece, ...]:
    at, _, leaf = name.rpartition(".")
    parts = _PER_EXPERT.get(leaf, ()) if at.endswith(".experts") else ()
    if name in table or not any(f"{at}.0.{part}.weight" in table for part in parts):
        return (_Piece(name, shape),)
    experts, rows = shape[0], shape[1] // len(parts)
    return tuple(
        _Piece(f"{at}.{expert}.{part}.weight", (rows, *shape[2:]), (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(experts)
        for i, part in enumerate(parts)
    )


def _check(directory: Path, table: Mapping[str, TensorEntry], recipes: list[_Recipe]) -> None:
    pieces = [piece for recipe in recipes for piece in recipe.pieces]
    found = [(piece, table[piece.name]) for piece in pieces if piece.name in table]
    read = {piece.name for piece in pieces}
    # What a model reads of its layers and of its draft head it reads whole: a tensor left over would be a term left out.
    whole = tuple(prefix for prefix in ("model.layers.", "mtp.") if any(name.startswith(prefix) for name in read))
    legal = ", ".join(LOADABLE)
    problems = (
        ("has a quantised dtype", [f"{e.name} ({e.dtype}; supported are {legal})" for _, e in found if e.dtype not in LOADABLE]),
        ("is missing", [f"{p.name} (expected {list(p.shape)})" for p in pieces if p.name not in table]),
        ("has a wrong shape", [f"{e.name} (found {list(e.shape)}, expected {list(p.shape)})" for p, e in found if e.shape != p.shape]),
        ("is not part of the model", [entry.name for name, entry in table.items() if name.startswith(whole) and name not in read]),
    )
    for problem, names in problems:
        if names:
            more = f"; so with {len(names) - 1} more: {', '.join(names[1 : 1 + _MOST_OTHERS])}" if len(names) > 1 else ""
            raise CheckpointError(f"{directory}: tensor {names[0]} {problem}{more}")


def _read(recipe: _Recipe, table: Mapping[str, TensorEntry], handles: Mapping[Path, Any]) -> torch.Tensor:
    param = recipe.param
    sources = [_assemble(shape, pieces, table, handles) for shape, pieces in zip(param.source.shapes, recipe.sources, strict=True)]
    # Copied even where nothing changes: what safetensors hands out is a view of the mapped file.
    return torch.empty(param.aval.shape, dtype=param.aval.dtype).copy_(param.source.join(*sources))


def _assemble(
    shape: tuple[int, ...], pieces: tuple[_Piece, ...], table: Mapping[str, TensorEntry], handles: Mapping[Path, Any]
) -> torch.Tensor:
    parts = [handles[table[piece.name].file].get_tensor(table[piece.name].name) for piece in pieces]
    if pieces[0].place == ():
        return parts[0]  # type: ignore[no-any-return]
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for piece, part in zip(pieces, parts, strict=True):
        whole[piece.place] = part
    return whole
