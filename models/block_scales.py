"""Reads FP8 matrices with a scale for each block as floats, region by region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..graphs.errors import CheckpointError
from .quant.quantization_config import FIELD, method_in
from .quant.quantization_config import FP8 as METHOD
from .quant.settings import BLOCK
from .safetensors_files import DTYPES, Checkpoint, TensorEntry

FP8, SUFFIX = "F8_E4M3", "_scale_inv"
SCALES = (*DTYPES, "F8_E8M0")
"""Dtypes of scales: numbers as they stand, and powers of two in a byte (OCP Microscaling Formats 1.0, section 5.4.1)."""

_BAND = 8 * BLOCK
"""Rows that are multiplied at once: of a large matrix little more than the result is in memory."""


@dataclass(frozen=True)
class BlockScaledEntry(TensorEntry):
    """A matrix [..., N, K] of FP8 values that reads as float32: each value times the scale of its block, edge blocks partial.

    Attributes:
        values: the values on disk.
        scales: [..., ceil(N / BLOCK), ceil(K / BLOCK)] in one of SCALES on disk. Despite their name, `weight_scale_inv`, they multiply.
    """

    values: TensorEntry
    scales: TensorEntry

    def read_into(self, target: torch.Tensor, region: Sequence[slice] | None = None) -> None:
        """As of TensorEntry; of the scales only those of blocks that the region meets are read."""
        bounds = [slice(*part.indices(size)[:2]) for part, size in zip(region or [slice(None)] * len(self.shape), self.shape, strict=True)]
        *lead, rows, columns = bounds
        for begin in range(rows.start, rows.stop, _BAND):
            band = slice(begin, min(begin + _BAND, rows.stop))
            self._multiply(target.narrow(-2, begin - rows.start, band.stop - begin), lead, [band, columns])

    def _multiply(self, target: torch.Tensor, lead: Sequence[slice], matrix: Sequence[slice]) -> None:
        blocks = [slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in matrix]
        scales = self.scales.read_slice([*lead, *blocks])
        # A product with a scale of at most 24 bits is rounded once, in float32; only wider scales need more.
        wide = torch.float64 if scales.dtype == torch.float64 else torch.float32
        scales = scales.to(wide)
        for dim, part, block in zip((-2, -1), matrix, blocks, strict=True):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, part.start - block.start * BLOCK, part.stop - part.start)
        target.copy_(self.values.read_slice([*lead, *matrix]).to(wide).mul_(scales))


def with_block_scales(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every FP8 matrix that has block scales as one tensor of float32; the scales are no tensors of their own then.

    Raises:
        CheckpointError: the scales of a matrix are missing, or have a wrong shape or dtype, or config.json does not say that there are any.
    """
    values = {name: entry for name, entry in checkpoint.tensors.items() if entry.dtype == FP8}
    if not values:
        return checkpoint
    for directory in {entry.file.parent for entry in values.values()}:
        _check_declared(directory, next(entry for entry in values.values() if entry.file.parent == directory))
    tensors = {name: _scaled(checkpoint, entry) if name in values else entry for name, entry in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=_without_scales(tensors, values))


def _check_declared(directory: Path, entry: TensorEntry) -> None:
    if method_in(directory) != METHOD:
        raise CheckpointError(
            f"{directory}: tensor {entry.name} is {FP8}, and config.json has no {FIELD} of quant_method {METHOD!r}; "
            f"legal is one with weight_block_size [{BLOCK}, {BLOCK}]"
        )


def _without_scales(tensors: Mapping[str, TensorEntry], values: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    scales = {name + SUFFIX for name in values}
    return {name: entry for name, entry in tensors.items() if name not in scales}


def _scaled(checkpoint: Checkpoint, entry: TensorEntry) -> BlockScaledEntry:
    scales = checkpoint.tensors.get(entry.name + SUFFIX)
    expected = (*entry.shape[:-2], *(-(-size // BLOCK) for size in entry.shape[-2:]))
    if scales is None or scales.dtype not in SCALES or scales.shape != expected:
        found = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {entry.name} is {FP8} {list(entry.shape)} and {entry.name}{SUFFIX} is {found}; "
            f"expected {' or '.join(SCALES)} {list(expected)}, a scale for each block of {BLOCK} by {BLOCK}"
        )
    return BlockScaledEntry(entry.name, entry.file, "F32", entry.shape, entry.begin, entry.end, entry, scales)
