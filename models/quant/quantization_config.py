"""Reads how a checkpoint is quantised from `quantization_config` of its config.json: compressed-tensors, or FP8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...graphs.errors import CheckpointError, ConfigError
from ..config import read_json
from ..safetensors_files import DTYPES, open_checkpoint
from . import settings
from .formats import FLOAT, W4A16, W8A8_DYNAMIC
from .well_formed import check_well_formed

FIELD, COMPRESSED, FP8 = "quantization_config", "compressed-tensors", "fp8"
METHODS = (COMPRESSED, FP8)

_LAYOUTS = {"int-quantized": W8A8_DYNAMIC, "pack-quantized": W4A16, "float-quantized": FP8}
_STORED = {"weight": W8A8_DYNAMIC, "weight_packed": W4A16}
"""The last name of a tensor of integers -> the format of its matrix."""
_FLOAT8 = "F8_E4M3"
_NOT_LINEAR = ("embed_tokens",)
"""Last names of modules that have a matrix and are no linear layers, which compressed-tensors targets by their class."""


def forms_in(directory: Path) -> tuple[dict[str, str], int]:
    """Format of each matrix of a checkpoint whose config.json has a quantization_config; empty where it has none, or all are floats.
    And how many int4 weights of an output channel share a scale, 0 for all.

    FP8 with its scales reads as floats (models/block_scales.py), and so is not a format of a matrix.

    Raises:
        CheckpointError: naming the method, or the setting of it, that is not read here.
    """
    if method_in(directory) != COMPRESSED:
        return {}, 0
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
    check_well_formed(f"{path}: {FIELD}", config)
    method = config.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(f"{path}: {FIELD}: quant_method is {method!r}; legal are {', '.join(METHODS)}")
    if method == FP8:
        settings.check(f"{path}: {FIELD}", config, settings.FP8)
    return str(method)


def has_blocks(directory: Path) -> bool:
    """Whether config.json of an FP8 checkpoint says that blocks have a scale; else matrices have one each."""
    return settings_of(_read(directory / "config.json")).get("weight_block_size") is not None


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


def _matrices(directory: Path) -> dict[str, str]:
    """The format in which each matrix is stored."""
    forms: dict[str, str] = {}
    for name, entry in open_checkpoint(directory).tensors.items():
        matrix, _, kind = name.rpartition(".")
        # Of a matrix that is there twice, the integers are what is read, and the floats are refused as what no parameter reads.
        if kind in _STORED and len(entry.shape) == 2 and forms.get(matrix, FLOAT) == FLOAT:
            forms[matrix] = FLOAT if entry.dtype in DTYPES else FP8 if entry.dtype == _FLOAT8 else _STORED[kind]
    return forms


def _compressed(where: str, config: Mapping[str, Any], matrices: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """What is stored as floats is float, whatever the patterns say: they are of classes, which names of tensors do not tell."""
    settings.check(where, config, settings.COMPRESSED)
    if sparsity := config.get("sparsity_config"):
        settings.check(f"{where}: sparsity_config", sparsity, settings.SPARSITY)
    groups, ignored = config.get("config_groups") or {}, config.get("ignore") or []
    targets: dict[str, list[str]] = {}
    sizes: set[int] = set()
    for name, group in groups.items():
        place = f"{where}: config_groups: {name}"
        layout = group.get("format") or config.get("format")
        if layout not in _LAYOUTS:
            raise CheckpointError(f"{place}: format is {layout!r}; legal is {', '.join(_LAYOUTS)}")
        settings.check(place, group, settings.GROUP)
        form, weights, activations = _LAYOUTS[layout], group.get("weights") or {}, group.get("input_activations")
        if form == FP8:
            settings.check(f"{place}: weights", weights, settings.FLOAT8_WEIGHTS)
            if activations:
                settings.check(f"{place}: input_activations", activations, settings.FLOAT8_ACTIVATIONS)
        elif form == W4A16:
            sizes.add(_group_size(f"{place}: weights", weights))
            if activations:
                raise CheckpointError(f"{place}: input_activations is {activations!r}; legal beside {layout} is null")
        else:
            settings.check(f"{place}: weights", weights, settings.INT8_WEIGHTS)
            settings.check(f"{place}: input_activations", activations or {}, settings.INT8_ACTIVATIONS)
        targets.setdefault(form, []).extend(group.get("targets") or [])
    if len(sizes) > 1:
        raise CheckpointError(f"{where}: int4 matrices have groups of {', '.join(map(str, sorted(sizes)))} weights; legal is one size")
    for matrix, stored in matrices.items():
        if stored != FLOAT and (_matches(matrix, ignored) or not _matches(matrix, targets.get(stored, ()))):
            why = "ignore names it" if _matches(matrix, ignored) else "no group of that format targets it"
            raise CheckpointError(f"{where}: {matrix} is stored as {stored}, and {why}; legal is a matrix of floats, or a group for it")
    return {matrix: FLOAT if form == FP8 else form for matrix, form in matrices.items()}, next(iter(sizes), 0)


def _group_size(where: str, weights: Mapping[str, Any]) -> int:
    """Weights of an output channel that share an int4 scale; 0: all."""
    settings.check(where, weights, settings.INT4_WEIGHTS)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        return 0
    if strategy != "group" or not isinstance(size, int) or size < 1:
        raise CheckpointError(f"{where}: strategy is {strategy!r} with group_size {size!r}; legal is 'channel', or 'group' with a size")
    return size


def _matches(matrix: str, patterns: Iterable[str]) -> bool:
    """Whether compressed-tensors' patterns take a module: `Linear` for its class, `re:` and a regular expression, or a name."""
    for pattern in patterns:
        if pattern == "Linear":
            if matrix.rpartition(".")[2] not in _NOT_LINEAR:
                return True
        elif re.match(pattern[3:], matrix) if pattern.startswith("re:") else pattern == matrix:
            return True
    return False
