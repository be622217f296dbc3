"""Reads FP8 matrices with a scale for each block as floats, region by region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..graphs.errors import CheckpointError
from .safetensors_files import Checkpoint, TensorEntry

FP8, SUFFIX = "F8_E4M3", "_scale_inv"
BLOCK = 128
"""Rows and columns of a block: `weight_block_size` of published checkpoints (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""


@dataclass(frozen=True)
class BlockScaledEntry(TensorEntry):
    """A matrix [..., N, K] of FP8 values that reads as float32: each value times the scale of its block, edge blocks partial.

    Attributes:
        values: the values on disk.
        scales: [..., ceil(N / BLOCK), ceil(K / BLOCK)] float32 on disk. Despite their name, `weight_scale_inv`, they multiply.
    """

    values: TensorEntry
    scales: TensorEntry

    def read_into(self, target: torch.Tensor, region: Sequence[slice] | None = None) -> None:
        """As of TensorEntry; of the scales only those of blocks that the region meets are read."""
        bounds = [slice(*part.indices(size)[:2]) for part, size in zip(region or [slice(None)] * len(self.shape), self.shape, strict=True)]
        lead, matrix = bounds[:-2], bounds[-2:]
        blocks = [slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in matrix]
        scales = self.scales.read_slice([*lead, *blocks])
        for dim, part, block in zip((-2, -1), matrix, blocks, strict=True):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, part.start - block.start * BLOCK, part.stop - part.start)
        torch.mul(self.values.read_slice(bounds).float(), scales, out=target)


def with_block_scales(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every FP8 matrix that has block scales as one tensor of float32; the scales are no tensors of their own then.

    Raises:
        CheckpointError: the scales of a matrix are missing, or have a wrong shape or dtype.
    """
    values = {name: entry for name, entry in checkpoint.tensors.items() if entry.dtype == FP8}
    if not values:
        return checkpoint
    tensors = {name: _scaled(checkpoint, entry) if name in values else entry for name, entry in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=_without_scales(tensors, values))


def _without_scales(tensors: Mapping[str, TensorEntry], values: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    scales = {name + SUFFIX for name in values}
    return {name: entry for name, entry in tensors.items() if name not in scales}


def _scaled(checkpoint: Checkpoint, entry: TensorEntry) -> BlockScaledEntry:
    scales = checkpoint.tensors.get(entry.name + SUFFIX)
    expected = (*entry.shape[:-2], *(-(-size // BLOCK) for size in entry.shape[-2:]))
    if scales is None or (scales.dtype, scales.shape) != ("F32", expected):
        found = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {entry.name} is {FP8} {list(entry.shape)} and {entry.name}{SUFFIX} is {found}; "
            f"expected F32 {list(expected)}, a scale for each block of {BLOCK} by {BLOCK}"
        )
    return BlockScaledEntry(entry.name, entry.file, "F32", entry.shape, entry.begin, entry.end, entry, scales)
