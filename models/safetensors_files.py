"""Turns a directory of safetensors files into a table of its tensors, read from the headers alone."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..graphs.errors import CheckpointError, ConfigError
from .config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_CONTENT_DIGEST_BYTES = 2 * 1024**3
_MIB = 1024**2


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        name: as the file calls it.
        file: where it lies.
        dtype: the format's code, e.g. `BF16`.
        shape: sizes.
        begin, end: its bytes in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its bytes on disk."""
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint directory holds; no tensor is in memory.

    Attributes:
        directory: where it is.
        files: its safetensors files, by name.
        tensors: every tensor by its name on disk.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Reads the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
        CheckpointError: naming the file that is absent, truncated or corrupt, or the tensor that the index misplaces.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a checkpoint is a directory with {SINGLE}")
    if (directory / SINGLE).exists():
        entries = _entries(directory / SINGLE)
        return Checkpoint(directory, (directory / SINGLE,), entries)
    if not (directory / INDEX).exists():
        there = ", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{directory}: holds neither {SINGLE} nor {INDEX}, the only formats read; there is {there}")
    placed = _weight_map(directory / INDEX)
    tensors: dict[str, TensorEntry] = {}
    files = tuple(directory / name for name in sorted(set(placed.values())))
    for file in files:
        # A tensor that two shards hold is taken from where the index says; one that it does not list is not lost.
        tensors.update((name, entry) for name, entry in _entries(file).items() if placed.get(name, file.name) == file.name)
    for name, file_name in placed.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / INDEX}: says {name} is in {file_name}, which does not hold it")
    return Checkpoint(directory, files, tensors)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        placed: Any = read_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{path}: weight_map is {_short(placed)}; expected an object from tensor names to file names")
    for name, file in placed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map says {name} is in {_short(file)}; expected the name of a file in the same directory")
    return placed


def _entries(file: Path) -> dict[str, TensorEntry]:
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
        with safe_open(file, "pt") as handle:
            entries, begin = {}, 8 + header_bytes
            for name in handle.offset_keys():
                view = handle.get_slice(name)
                dtype, shape = view.get_dtype(), tuple(view.get_shape())
                # The format leaves no holes and no odd bits between tensors, so their order gives their places.
                end = begin + math.prod(shape) * _bits(dtype) // 8
                entries[name] = TensorEntry(name, file, dtype, shape, begin, end)
                begin = end
            return entries
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file, though {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        size = f"; the file has {file.stat().st_size} bytes" if file.is_file() else ""
        raise CheckpointError(f"{file}: truncated or corrupt safetensors: {error}{size}") from None


def _bits(dtype: str) -> int:
    """Width of an element: the first number in the code, as in BF16 or F8_E4M3; BOOL has none and takes a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def digest(checkpoint: Checkpoint) -> str:
    """What the weights and config.json are, in 64 hex digits behind the kind of evidence.

    `content:` hashes every byte. Above 2 GiB of tensors that would take longer than loading them, so `header:` hashes each
    file's header, size, modification time, first and last MiB instead: a rewritten file is noticed, silent bit rot is not.

    Raises:
        CheckpointError: when a file disappeared since the checkpoint was opened.
    """
    small = checkpoint.nbytes <= LARGEST_CONTENT_DIGEST_BYTES
    total = hashlib.sha256()
    config = checkpoint.directory / "config.json"
    for file in (*checkpoint.files, *([config] if config.exists() else [])):
        try:
            part = _hash_file(file, _whole if small or file == config else _outline)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read any more: {error}") from None
        total.update(f"{file.name} {part}\n".encode())
    return f"{'content' if small else 'header'}:{total.hexdigest()}"


def _hash_file(file: Path, read: Callable[[Path, Callable[[bytes], None]], None]) -> str:
    hasher = hashlib.sha256()
    read(file, hasher.update)
    return hasher.hexdigest()


def _whole(file: Path, update: Callable[[bytes], None]) -> None:
    with file.open("rb") as stream:
        while block := stream.read(_MIB):
            update(block)


def _outline(file: Path, update: Callable[[bytes], None]) -> None:
    with file.open("rb") as stream:
        status = file.stat()
        header_bytes = int.from_bytes(stream.read(8), "little")
        update(f"{status.st_size} {status.st_mtime_ns} ".encode())
        for begin, count in ((0, 8 + header_bytes), (0, _MIB), (max(0, status.st_size - _MIB), _MIB)):
            stream.seek(begin)
            update(stream.read(count))
