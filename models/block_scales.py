"""Reads FP8 matrices with a scale for each block or output channel as floats, region by region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..graphs.errors import CheckpointError
from .quant.quantization_config import COMPRESSED, FIELD, method_in
from .quant.quantization_config import FP8 as METHOD
from .quant.settings import BLOCK
from .safetensors_files import DTYPES, Checkpoint, TensorEntry

FP8 = "F8_E4M3"
SUFFIXES = {METHOD: "_scale_inv", COMPRESSED: "_scale"}
"""What the name of a matrix's scales has behind the matrix's, by how config.json says that it is quantised."""
SCALES = (*DTYPES, "F8_E8M0")
"""Dtypes of scales: numbers as they stand, and powers of two in a byte (OCP Microscaling Formats 1.0, section 5.4.1)."""

_BAND = 8 * BLOCK
"""Rows that are multiplied at once: of a large matrix little more than the result is in memory."""


@dataclass(frozen=True)
class BlockScaledEntry(TensorEntry):
    """A matrix [..., N, K] of FP8 values that reads as float32: each value times the scale of its block, edge blocks partial.

    Attributes:
        values: the values on disk.
        scales: [..., ceil(N / rows), ceil(K / columns)] in one of SCALES on disk. They multiply, `weight_scale_inv` despite its name too.
        block: rows and columns that share a scale.
    """

    values: TensorEntry
    scales: TensorEntry
    block: tuple[int, int] = (BLOCK, BLOCK)

    def read_into(self, target: torch.Tensor, region: Sequence[slice] | None = None) -> None:
        """As of TensorEntry; of the scales only those of blocks that the region meets are read."""
        bounds = [slice(*part.indices(size)[:2]) for part, size in zip(region or [slice(None)] * len(self.shape), self.shape, strict=True)]
        *lead, rows, columns = bounds
        for begin in range(rows.start, rows.stop, _BAND):
            band = slice(begin, min(begin + _BAND, rows.stop))
            self._multiply(target.narrow(-2, begin - rows.start, band.stop - begin), lead, [band, columns])

    def _multiply(self, target: torch.Tensor, lead: Sequence[slice], matrix: Sequence[slice]) -> None:
        blocks = [slice(part.start // size, -(-part.stop // size)) for part, size in zip(matrix, self.block, strict=True)]
        scales = self.scales.read_slice([*lead, *blocks])
        # A product with a scale of at most 24 bits is rounded once, in float32; only wider scales need more.
        wide = torch.float64 if scales.dtype == torch.float64 else torch.float32
        scales = scales.to(wide)
        for dim, size, part, block in zip((-2, -1), self.block, matrix, blocks, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, part.start - block.start * size, part.stop - part.start)
        target.copy_(self.values.read_slice([*lead, *matrix]).to(wide).mul_(scales))


def with_block_scales(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every FP8 matrix as one tensor of float32; its scales are no tensors of their own then.

    Raises:
        CheckpointError: the scales of a matrix are missing, or have a wrong shape or dtype, or config.json does not say that there are any.
    """
    values = {name: entry for name, entry in checkpoint.tensors.items() if entry.dtype == FP8}
    if not values:
        return checkpoint
    first = {entry.file.parent: entry for entry in reversed(values.values())}
    suffixes = {directory: _suffix(directory, entry) for directory, entry in first.items()}
    scales = {name: name + suffixes[entry.file.parent] for name, entry in values.items()}
    tensors = {name: _scaled(checkpoint, entry, scales[name]) if name in values else entry for name, entry in checkpoint.tensors.items()}
    return replace(checkpoint, tensors={name: entry for name, entry in tensors.items() if name not in scales.values()})


def _suffix(directory: Path, entry: TensorEntry) -> str:
    method = method_in(directory)
    if method not in SUFFIXES:
        raise CheckpointError(
            f"{directory}: tensor {entry.name} is {FP8}, and config.json has no {FIELD} of quant_method {METHOD!r} or {COMPRESSED!r}; "
            f"legal is one of the first with weight_block_size [{BLOCK}, {BLOCK}], or of the second in 'float-quantized'"
        )
    return SUFFIXES[method]


def _scaled(checkpoint: Checkpoint, entry: TensorEntry, name: str) -> BlockScaledEntry:
    scales, blocks = checkpoint.tensors.get(name), {f"block of {BLOCK} by {BLOCK}": (BLOCK, BLOCK)}
    if not name.endswith(SUFFIXES[METHOD]):
        blocks["output channel"] = (1, entry.shape[-1])
    shapes = {block: (*entry.shape[:-2], *map(_blocks, entry.shape[-2:], block)) for block in blocks.values()}
    block = next((block for block, shape in shapes.items() if scales and scales.shape == shape), None)
    if scales is None or scales.dtype not in SCALES or block is None:
        found = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        expected = " or ".join(f"{list(shapes[block])}, a scale for each {what}" for what, block in blocks.items())
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {entry.name} is {FP8} {list(entry.shape)} and {name} is {found}; "
            f"expected {' or '.join(SCALES)} {expected}"
        )
    return BlockScaledEntry(entry.name, entry.file, "F32", entry.shape, entry.begin, entry.end, entry, scales, block)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
