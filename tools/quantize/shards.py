"""Writing safetensors files whose tensors are made one after the other, so that no more than one of them is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...models.safetensors_files import STORED_DTYPES, TensorEntry, bytes_of

SHARD_BYTES = 4 * 1024**3
"""A file holds no more than this, unless what belongs together is more (ModelSlim's part_file_size)."""

COPY_BYTES = 16 * 1024**2
_CODES = {dtype: code for code, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """The place of a tensor that is not yet written.

    Attributes:
        dtype: the format's code, e.g. `BF16`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @staticmethod
    def like(name: str, tensor: torch.Tensor) -> Slot:
        """For a tensor of that shape and dtype."""
        return Slot(name, _CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)

    @staticmethod
    def copy_of(entry: TensorEntry) -> Slot:
        """For a tensor as another file has it."""
        return Slot(entry.name, entry.dtype, entry.shape, entry.nbytes)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.nbytes // max(1, torch.Size(self.shape).numel())


class ShardWriter:
    """Files `<stem>-00001-of-0000n.safetensors` with the headers of all tensors, which are filled in any order, and their index.

    Args:
        directory: exists.
        stem: what the files' names begin with.
        groups: tensors; those of a group are in one file.
        shard_bytes: most bytes of a file.
    """

    def __init__(self, directory: Path, stem: str, groups: Iterable[Sequence[Slot]], shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._stem = directory, stem
        self._places: dict[str, tuple[Path, int, Slot]] = {}
        shards = _shards(groups, shard_bytes)
        for number, slots in enumerate(shards, 1):
            self._create(directory / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", slots)
        self._open = set(self._places)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Fills a tensor's place.

        Args:
            tensor: of the shape and dtype that were announced.
        """
        file, offset, slot = self._places[name]
        assert slot == Slot.like(name, tensor), (slot, tensor.shape, tensor.dtype)
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(bytes_of(tensor.contiguous()))
        self._open.remove(name)

    def copy(self, entry: TensorEntry) -> None:
        """Fills a tensor's place with the bytes of a tensor of the same name in another file."""
        file, offset, slot = self._places[entry.name]
        with entry.file.open("rb") as source, file.open("r+b") as stream:
            source.seek(entry.begin)
            stream.seek(offset)
            left = slot.nbytes
            while left:
                block = source.read(min(left, COPY_BYTES))
                if not block:
                    raise OSError(0, "became shorter while it was copied", str(entry.file))
                stream.write(block)
                left -= len(block)
        self._open.remove(entry.name)

    def finish(self) -> Path:
        """Writes the index, once every place is filled; returns its path."""
        assert not self._open, sorted(self._open)[:3]
        total = sum(slot.nbytes for _, _, slot in self._places.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: file.name for name, (file, _, _) in self._places.items()}}
        path = self._directory / f"{self._stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return path

    def _create(self, file: Path, slots: Sequence[Slot]) -> None:
        # Widest elements first: each tensor then begins at a multiple of its element, which readers that map the file need.
        header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
        begin = 0
        ordered = sorted(slots, key=lambda slot: -slot.item_bytes)
        for slot in ordered:
            header[slot.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": [begin, begin + slot.nbytes]}
            begin += slot.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + begin)
        for slot in slots:
            self._places[slot.name] = (file, 8 + len(text) + header[slot.name]["data_offsets"][0], slot)


def _shards(groups: Iterable[Sequence[Slot]], shard_bytes: int) -> list[list[Slot]]:
    shards: list[list[Slot]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(slot.nbytes for slot in group)
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].extend(group)
        size += nbytes
    return shards
