"""Reads how a checkpoint is quantised from `quantization_config` of its config.json: compressed-tensors in int8, or FP8 blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...graphs.errors import CheckpointError, ConfigError
from ..config import read_json
from ..safetensors_files import open_checkpoint
from .formats import FLOAT, W8A8_DYNAMIC

FIELD, COMPRESSED, FP8 = "quantization_config", "compressed-tensors", "fp8"
METHODS = (COMPRESSED, FP8)

BLOCK = 128
"""Rows and columns of a block of FP8: `weight_block_size` of published checkpoints (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""

_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_LAYOUTS = ("int-quantized",)
_FP8 = {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
_NOT_LINEAR = ("embed_tokens",)
"""Last names of modules that have a matrix and are no linear layers, which compressed-tensors targets by their class."""


def forms_in(directory: Path) -> dict[str, str]:
    """Format of each matrix of a checkpoint whose config.json has a quantization_config; empty where it has none, or all are floats.

    FP8 with a scale for each block reads as floats (models/block_scales.py), and so is not a format of a matrix.

    Raises:
        CheckpointError: naming the method, or the setting of it, that is not read here.
    """
    if method_in(directory) != COMPRESSED:
        return {}
    path = directory / "config.json"
    return _compressed(f"{path}: {FIELD}", settings_of(_read(path)), _matrices(directory))


def method_in(directory: Path) -> str | None:
    """How config.json says that a checkpoint is quantised, one of METHODS; None where it does not.

    Raises:
        CheckpointError: naming a method that is not read here, or a setting of FP8 that is not.
    """
    path = directory / "config.json"
    config = settings_of(_read(path)) if path.exists() else {}
    if not config:
        return None
    method = config.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(f"{path}: {FIELD}: quant_method is {method!r}; legal are {', '.join(METHODS)}")
    if method == FP8:
        _require(f"{path}: {FIELD}", {"fmt": "e4m3", **config}, _FP8)
    return str(method)


def settings_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json, or of the language model in it; empty where there is none."""
    nested = values.get("text_config")
    config = values.get(FIELD) or (nested.get(FIELD) if isinstance(nested, Mapping) else None)
    return config if isinstance(config, Mapping) else {"quant_method": config} if config else {}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _matrices(directory: Path) -> list[str]:
    tensors = open_checkpoint(directory).tensors
    return [name.removesuffix(".weight") for name, entry in tensors.items() if name.endswith(".weight") and len(entry.shape) == 2]


def _compressed(where: str, config: Mapping[str, Any], matrices: Iterable[str]) -> dict[str, str]:
    if config.get("kv_cache_scheme"):
        raise CheckpointError(
            f"{where}: kv_cache_scheme is {config['kv_cache_scheme']!r}: a quantised cache is not read here; legal is null"
        )
    groups, ignored = config.get("config_groups") or {}, config.get("ignore") or []
    targets: list[str] = []
    for name, group in groups.items():
        place = f"{where}: config_groups: {name}"
        layout = group.get("format") or config.get("format")
        if layout not in _LAYOUTS:
            raise CheckpointError(f"{place}: format is {layout!r}; legal is {', '.join(_LAYOUTS)}")
        _require(f"{place}: weights", group.get("weights") or {}, _WEIGHTS)
        _require(f"{place}: input_activations", group.get("input_activations") or {}, _ACTIVATIONS)
        targets += group.get("targets") or []
    return {matrix: W8A8_DYNAMIC if _matches(matrix, targets) and not _matches(matrix, ignored) else FLOAT for matrix in matrices}


def _require(where: str, values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, legal in expected.items():
        if values.get(name) != legal:
            raise CheckpointError(f"{where}: {name} is {values.get(name)!r}; legal is {legal!r}")


def _matches(matrix: str, patterns: Iterable[str]) -> bool:
    """Whether compressed-tensors' patterns take a module: `Linear` for its class, `re:` and a regular expression, or a name."""
    for pattern in patterns:
        if pattern == "Linear":
            if matrix.rpartition(".")[2] not in _NOT_LINEAR:
                return True
        elif re.match(pattern[3:], matrix) if pattern.startswith("re:") else pattern == matrix:
            return True
    return False
