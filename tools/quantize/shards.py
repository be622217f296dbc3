"""Writing safetensors files whose tensors are made one after the other, so that no more than one of them is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ...models.safetensors_files import TensorEntry, bytes_of, layout

SHARD_BYTES = 4 * 1024**3
"""A file holds no more than this, unless what belongs together is more (ModelSlim's part_file_size)."""
COPY_BYTES = 16 * 1024**2
PYTORCH = {"format": "pt"}
"""Metadata without which transformers refuses a file."""

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name; `meta` ones announce shapes and dtypes."""


class ShardWriter:
    """Files `<stem>-00001-of-0000n.safetensors` with the headers of all tensors, which are filled in any order, and their index.

    Args:
        directory: exists.
        stem: what the files' names begin with.
        groups: tensors as they will be; those of a group are in one file.
        shard_bytes: most bytes of a file.
    """

    def __init__(self, directory: Path, stem: str, groups: Iterable[Tensors], shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._stem = directory, stem
        self._places: dict[str, tuple[Path, int, torch.Tensor]] = {}
        shards = _shards(groups, shard_bytes)
        for number, tensors in enumerate(shards, 1):
            file = directory / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            header, offsets = layout(tensors, PYTORCH)
            with file.open("wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
            self._places |= {name: (file, offsets[name], tensor) for name, tensor in tensors.items()}
        self._open = set(self._places)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Fills a tensor's place.

        Args:
            tensor: of the shape and dtype that were announced.
        """
        file, offset, announced = self._places[name]
        assert (tensor.shape, tensor.dtype) == (announced.shape, announced.dtype), (name, tensor.shape, tensor.dtype, announced)
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(bytes_of(tensor.contiguous()))
        self._open.remove(name)

    def copy(self, entry: TensorEntry) -> None:
        """Fills a tensor's place with the bytes of a tensor of the same name in another file."""
        file, offset, announced = self._places[entry.name]
        with entry.file.open("rb") as source, file.open("r+b") as stream:
            source.seek(entry.begin)
            stream.seek(offset)
            left = announced.nbytes
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
        total = sum(tensor.nbytes for _, _, tensor in self._places.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: file.name for name, (file, _, _) in self._places.items()}}
        path = self._directory / f"{self._stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return path


def _shards(groups: Iterable[Tensors], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group.values())
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1].update(group)
        size += nbytes
    return shards
