"""Reads which format each matrix of a quantised checkpoint has: from ModelSlim's description, or from quantization_config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...graphs.errors import CheckpointError, ConfigError
from ..config import read_json
from .formats import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC, Formats

DESCRIPTION = "quant_model_description.json"
"""What ModelSlim writes beside its weights: the type of each tensor by name."""

_TYPES = {"FLOAT": FLOAT, "W8A8": W8A8, "W8A8_DYNAMIC": W8A8_DYNAMIC, "W4A8_DYNAMIC": W4A8_DYNAMIC}
MIXED = "W8A8_MIX"
"""Matrices with both kinds of scales of activations: serving stacks take those of each token in prefill and static ones where they only
decode (methods/w8a8_pdmix.py of vllm-project/vllm-ascend, 182b75e)."""

PREFIXES = (("model.language_model.", "model."), *((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm.")))
"""(beginning of a name on disk, what the name begins with in the sources of parameters)."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj$")
_LAYER = re.compile(r"\.layers\.\d+\.")


def canonical(name: str) -> str:
    """A tensor's name as sources of parameters have it."""
    return next((to + name.removeprefix(prefix) for prefix, to in PREFIXES if name.startswith(prefix)), name)


def formats_in(directory: Path, *, decodes_only: bool = False) -> Formats | None:
    """The formats of the matrices of a ModelSlim checkpoint; None for a checkpoint without a description.

    Args:
        decodes_only: whether the model only decodes, what others prefilled.

    Raises:
        CheckpointError: the description is malformed, or names a type that is not read here.
    """
    path = directory / DESCRIPTION
    if not path.exists():
        return None
    try:
        values = read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    group = values.get("group_size", 0)
    if not isinstance(group, int) or group < 0:
        raise CheckpointError(f"{path}: group_size is {group!r}; expected a number of weights, 0 for all of an output channel")
    types: dict[str, dict[str, str]] = {}
    for name, kind in values.items():
        if isinstance(kind, str) and name.endswith(".weight"):
            types.setdefault(_matrix(name), {})[name] = kind
    forms = {matrix: _form(path, kinds, decodes_only) for matrix, kinds in types.items()}
    _refuse_others(path, values)
    return Formats(tuple(_rules(forms)), stored=True, group=group)


def biased_norms(directory: Path) -> frozenset[str]:
    """Names of norms that the description gives a bias, which outlier suppression moves there."""
    path = directory / DESCRIPTION
    if not path.exists():
        return frozenset()
    return frozenset(canonical(name) for name in read_json(path) if name.endswith("norm.bias"))


def _matrix(name: str) -> str:
    """The matrix that a tensor is part of; the experts of a layer are one."""
    stem = canonical(name).removesuffix(".weight")
    expert = _EXPERT.fullmatch(stem)
    if expert is None:
        return stem
    return f"{expert[1]}.{'down_proj' if expert[2] == 'down' else 'gate_up_proj'}"


def _form(path: Path, kinds: Mapping[str, str], decodes_only: bool) -> str:
    if len(set(kinds.values())) > 1:
        (one, first), (other, second) = next((a, b) for a in kinds.items() for b in kinds.items() if a[1] != b[1])
        raise CheckpointError(f"{path}: {one} is {first} and {other} is {second}; experts of a layer are one matrix and must have one type")
    kind = next(iter(kinds.values()))
    if kind == MIXED:
        return W8A8 if decodes_only else W8A8_DYNAMIC
    if kind not in _TYPES:
        raise CheckpointError(f"{path}: {next(iter(kinds))} is {kind}; legal are {', '.join((*_TYPES, MIXED))}")
    return _TYPES[kind]


_OTHER_SETTINGS = {
    "kv_quant_type": "an int8 key-value cache",
    "kv_cache_type": "an int8 key-value cache",
    "fa_quant_type": "int8 attention",
}


def _refuse_others(path: Path, values: Mapping[str, Any]) -> None:
    for name, what in _OTHER_SETTINGS.items():
        if values.get(name):
            raise CheckpointError(f"{path}: {name} is {values[name]!r}: {what} is not read here; legal is a checkpoint without it")


def _rules(forms: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Rules that give each matrix its format: one for all layers where they agree, and the exceptions before it."""
    families: dict[str, list[str]] = {}
    for matrix in forms:
        families.setdefault(_LAYER.sub(".layers.*.", matrix), []).append(matrix)
    for pattern, matrices in families.items():
        if all(forms[matrix] == FLOAT for matrix in matrices):
            continue
        usual = Counter(forms[matrix] for matrix in matrices).most_common(1)[0][0]
        yield from ((matrix, forms[matrix]) for matrix in matrices if forms[matrix] != usual)
        yield pattern, usual
