"""Reads FP8 matrices with a scale for each block or output channel, or one for all, as floats, region by region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..graphs.errors import CheckpointError
from .quant.quantization_config import COMPRESSED, FIELD, has_blocks, method_in
from .quant.quantization_config import FP8 as METHOD
from .quant.settings import BLOCK
from .safetensors_files import DTYPES, CheckpointFiles, TensorEntry

FP8 = "F8_E4M3"
OF_BLOCKS, OF_MATRIX = "_scale_inv", "_scale"
"""What the name of a matrix's scales has behind the matrix's: in FP8 as DeepSeek publishes it, and in others."""
ACTIVATIONS = "input_scale"
"""A static scale that would round activations to FP8, which are floats here, as where their scales are dynamic."""
SCALES = (*DTYPES, "F8_E8M0")
"""Dtypes of scales: numbers as they stand, and powers of two in a byte (OCP Microscaling Formats 1.0, section 5.4.1)."""

_BAND = 8 * BLOCK
"""Rows that are multiplied at once: of a large matrix little more than the result is in memory."""


@dataclass(frozen=True)
class BlockScaledEntry(TensorEntry):
    """A matrix [..., N, K] of FP8 values that reads as float32: each value times the scale of its block, edge blocks partial.

    Attributes:
        values: the values on disk.
        scales: [..., ceil(N / rows), ceil(K / columns)], or one number, in one of SCALES on disk. They multiply, `weight_scale_inv` despite
            its name too.
        block: rows and columns that share a scale; None: all do.
    """

    values: TensorEntry
    scales: TensorEntry
    block: tuple[int, int] | None = (BLOCK, BLOCK)

    def read_into(self, target: torch.Tensor, region: Sequence[slice] | None = None) -> None:
        """As of TensorEntry; of the scales only those of blocks that the region meets are read."""
        bounds = [slice(*part.indices(size)[:2]) for part, size in zip(region or [slice(None)] * len(self.shape), self.shape, strict=True)]
        *lead, rows, columns = bounds
        for begin in range(rows.start, rows.stop, _BAND):
            band = slice(begin, min(begin + _BAND, rows.stop))
            self._multiply(target.narrow(-2, begin - rows.start, band.stop - begin), lead, [band, columns])

    def _multiply(self, target: torch.Tensor, lead: Sequence[slice], matrix: Sequence[slice]) -> None:
        scales = self._scales(lead, matrix)
        target.copy_(self.values.read_slice([*lead, *matrix]).to(scales.dtype).mul_(scales))

    def _scales(self, lead: Sequence[slice], matrix: Sequence[slice]) -> torch.Tensor:
        """Of each value, or one of all, in a type in which products are rounded once: of scales of at most 24 bits float32 is."""
        if self.block is None:
            return _wide(self.scales.read().reshape(()))
        blocks = [slice(part.start // size, -(-part.stop // size)) for part, size in zip(matrix, self.block, strict=True)]
        scales = _wide(self.scales.read_slice([*lead, *blocks]))
        for dim, size, part, block in zip((-2, -1), self.block, matrix, blocks, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, part.start - block.start * size, part.stop - part.start)
        return scales


def _wide(scales: torch.Tensor) -> torch.Tensor:
    return scales.to(torch.float64 if scales.dtype == torch.float64 else torch.float32)


def with_block_scales(checkpoint: CheckpointFiles) -> CheckpointFiles:
    """The checkpoint with every FP8 matrix as one tensor of float32; its scales, and that of its activations, are no tensors then.

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
    dropped = {*scales.values(), *(f"{name.removesuffix('weight')}{ACTIVATIONS}" for name in scales)}
    return replace(checkpoint, tensors={name: entry for name, entry in tensors.items() if name not in dropped})


def _suffix(directory: Path, entry: TensorEntry) -> str:
    method = method_in(directory)
    if method not in (METHOD, COMPRESSED):
        raise CheckpointError(
            f"{directory}: tensor {entry.name} is {FP8}, and config.json has no {FIELD} of quant_method {METHOD!r} or {COMPRESSED!r}; "
            f"legal is one of the first with weight_block_size [{BLOCK}, {BLOCK}] or none, or of the second in 'float-quantized'"
        )
    return OF_BLOCKS if method == METHOD and has_blocks(directory) else OF_MATRIX


def _scaled(checkpoint: CheckpointFiles, entry: TensorEntry, name: str) -> BlockScaledEntry:
    scales, lead = checkpoint.tensors.get(name), entry.shape[:-2]
    blocks: dict[str, tuple[int, int] | None] = {f"a scale for each block of {BLOCK} by {BLOCK}": (BLOCK, BLOCK)}
    if not name.endswith(OF_BLOCKS):
        blocks["a scale for each output channel"] = (1, entry.shape[-1])
        # Experts in one tensor would have one each.
        blocks |= {} if lead else {"one for all": None}
    shapes = {what: (*lead, *map(_blocks, entry.shape[-2:], block)) if block else (1,) for what, block in blocks.items()}
    fits = [what for what, shape in shapes.items() if scales and scales.shape in (shape, shape if blocks[what] else ())]
    if scales is None or scales.dtype not in SCALES or not fits:
        found = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        expected = " or ".join(f"{list(shape)}, {what}" for what, shape in shapes.items())
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {entry.name} is {FP8} {list(entry.shape)} and {name} is {found}; "
            f"expected {' or '.join(SCALES)} {expected}"
        )
    return BlockScaledEntry(entry.name, entry.file, "F32", entry.shape, entry.begin, entry.end, entry, scales, blocks[fits[0]])


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
