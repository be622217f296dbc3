"""What compressed-tensors (0.20.0) has of an int4 checkpoint in `pack-quantized`: the tensors of a matrix, and the text of config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...graphs.quantise import pack_columns, quantise_w4_values
from ...models.safetensors_files import TensorEntry

STEM = "model"
"""What the names of its files begin with."""

SHAPE = "weight_shape"
"""The tensor that has the sizes of a matrix, which its words do not tell."""

_ALWAYS_FLOAT = ("lm_head",)
"""Modules that may have no tensor of their own, where they share the embedding's."""


def packed(values: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix [N, K] by the end of their names, and the floats [N, K] f32 that they stand for.

    Eight neighbours of a row are an int32, the first in the lowest bits, each plus 8. Scales are bfloat16, the dtype in which kernels
    multiply by them, written in the dtype of the model.

    Args:
        group: weights of an output channel that share a scale; 0: all.
        dtype: that the model computes in.
    """
    integers, scale = (x.t() for x in quantise_w4_values(values.t(), group, torch.bfloat16))
    floats = (integers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    tensors = {
        "weight_packed": pack_columns(integers),
        "weight_scale": scale.to(dtype).contiguous(),
        SHAPE: torch.tensor(values.shape, device=values.device),
    }
    return tensors, floats


def left_out(floats: Iterable[TensorEntry]) -> Iterator[str]:
    """The modules to ignore: those whose matrices stay float, and those whose experts do, where these are one tensor."""
    yield from _ALWAYS_FLOAT
    for entry in floats:
        if entry.name.endswith(".weight") and len(entry.shape) == 2:
            yield entry.name.removesuffix(".weight")
        elif ".experts." in entry.name and len(entry.shape) == 3:
            yield f"re:{re.escape(entry.name.rpartition('.')[0])}.*"


def quantization_config(group: int, floats: Iterable[TensorEntry]) -> dict[str, Any]:
    """`quantization_config` of config.json.

    Args:
        group: as of `packed`.
        floats: tensors that are written as they were.
    """
    strategy: Mapping[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(dict.fromkeys(left_out(floats))),
        "kv_cache_scheme": None,
    }
