"""Decides by what a checkpoint stores whether its output head is its embedding: files say that it is and store another one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .decoder import EMBEDDING, HEAD
from .quant.description import canonical
from .safetensors_files import DTYPES, STORED_DTYPES, TensorEntry, has_weights, open_checkpoint

TIED, TEXT = "tie_word_embeddings", "text_config"
_BLOCK_BYTES = 16 * 1024**2


def as_stored(values: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """The fields of a config.json that says, in the file or in its text model, that the head is the embedding, with what is so.

    Without a stored head it is; beside one of other values it is not; beside one of the same values both are true. A directory without
    weights leaves it to the file.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    text = values.get(TEXT)
    places = [each for each in (values, text) if isinstance(each, Mapping)]
    stated = [place[TIED] for place in places if isinstance(place.get(TIED), bool)]
    if True not in stated or not has_weights(directory):
        return values
    table = {canonical(name): entry for name, entry in open_checkpoint(directory).tensors.items()}
    tied = HEAD not in table
    if not tied and EMBEDDING in table and same_values(table[HEAD], table[EMBEDDING]):
        return values
    wrapped = {TEXT: {**text, TIED: tied}} if isinstance(text, Mapping) else {}
    return {**values, **wrapped, TIED: tied}


def same_values(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors on disk are equal, number by number; both are read, in blocks, once in a process.

    Raises:
        CheckpointError: a file changed since it was opened.
    """
    stamps = tuple((stat.st_mtime_ns, stat.st_size) for stat in (entry.file.stat() for entry in (one, other)))
    return _same_values(one, other, stamps)


@functools.lru_cache(maxsize=256)
def _same_values(one: TensorEntry, other: TensorEntry, stamps: tuple[tuple[int, int], ...]) -> bool:
    if one.shape != other.shape or not {one.dtype, other.dtype} <= set(DTYPES):
        return False
    wider = torch.promote_types(STORED_DTYPES[one.dtype], STORED_DTYPES[other.dtype])
    count, rest = one.shape[0], [slice(0, size) for size in one.shape[1:]]
    rows = max(1, _BLOCK_BYTES * count // max(1, one.nbytes))
    blocks = ([slice(begin, min(begin + rows, count)), *rest] for begin in range(0, count, rows))
    return all(torch.equal(one.read_slice(block).to(wider), other.read_slice(block).to(wider)) for block in blocks)
