"""Tensors that a quantised checkpoint has beside those that are read, each with the reason for which it is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ...graphs.errors import CheckpointError
from ..safetensors_files import TensorEntry
from .formats import sibling

_INT4 = "follows from an int4 weight and its scales"
_STATIC, _DYNAMIC = "of a matrix that is read with static scales", "of a matrix that is read with a scale for each token"

REASONS: dict[str, tuple[str, str]] = {
    "scale_bias": (_INT4, "weight_scale"),
    "weight_shape": ("follows from the model's sizes", "weight_packed"),
    "weight_scale": (_STATIC, "quant_bias"),
    "bias": (_STATIC + ", and part of their integers", "quant_bias"),
    "deq_scale": (_DYNAMIC, "weight_scale"),
    "quant_bias": (_DYNAMIC, "weight_scale"),
    "input_scale": (_DYNAMIC, "weight_scale"),
    "input_offset": (_DYNAMIC, "weight_scale"),
}
"""Kind of a tensor -> why it is not read, and the tensor of the same matrix that is read where that is true."""

_ZEROS = ("weight_offset", "weight_offset_second", "kv_cache_offset")
_COPY = "norm.module"
_FREQUENCIES = "rotary_emb.inv_freq"


def reason(name: str, read: Collection[str]) -> str | None:
    """Why a tensor is deliberately not read; None for one that is part of a model that does not know it.

    Args:
        read: names of the tensors that are read.
    """
    if name.endswith(_FREQUENCIES):
        return "a buffer that older versions write, which follows from the configuration"
    matrix, _, kind = name.rpartition(".")
    if matrix.endswith(_COPY) and f"{matrix.removesuffix('.module')}.weight" in read:
        return "a copy that older versions write of a norm"
    if must_be_zero(name, read):
        return "zeros" if f"{matrix}.weight" in read else None
    if kind == "kv_cache_scale" and f"{matrix}.weight" in read:
        return "of a cache that this build keeps in floats"
    why, other = REASONS.get(kind, ("", ""))
    return why if why and sibling(matrix, other) in read else None


def must_be_zero(name: str, read: Collection[str]) -> bool:
    """Whether a tensor that is not read must be zeros: offsets, and biases of what no bias is added to."""
    matrix, _, kind = name.rpartition(".")
    return kind in _ZEROS or (kind == "bias" and not matrix.endswith(_COPY) and f"{matrix}.quant_bias" not in read)


def check_zeros(directory: Path, entries: Iterable[TensorEntry]) -> None:
    """Reads tensors that must be zeros, each of a few numbers.

    Raises:
        CheckpointError: naming the one that is not.
    """
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.begin)):
        values = entry.read()
        if bool(values.any()):
            largest = float(values.abs().max())
            raise CheckpointError(f"{directory}: tensor {entry.name} has values up to {largest:g} and is not read; legal are zeros only")
