"""Reads which format each matrix of a quantised checkpoint has: from ModelSlim's description where there is one, else from config.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from ...graphs.errors import CheckpointError, ConfigError
from ..config import read_json
from ..safetensors_files import open_checkpoint
from . import settings
from .formats import FLOAT, INDEXERS, INT8, INT8_STATIC, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC, Formats
from .quantization_config import forms_in

DESCRIPTION = "quant_model_description.json"
"""What ModelSlim writes beside its weights: the type of each tensor by name."""

_TYPES = {"FLOAT": FLOAT, "W8A8": W8A8, "W8A8_DYNAMIC": W8A8_DYNAMIC, "W4A8_DYNAMIC": W4A8_DYNAMIC}
MIXED = "W8A8_MIX"
"""Matrices with both kinds of scales of activations: serving stacks take those of each token in prefill and static ones where they only
decode (methods/w8a8_pdmix.py of vllm-project/vllm-ascend, 182b75e)."""

VERSIONS = ("1.0.0",)
"""Legal values of a description's `version`. One without it is older: its int8 lies the same way, and each of its int4 takes a byte."""

PREFIXES = (
    ("model.language_model.", "model."),
    *((f"language_model.{name}", name) for name in ("model.", "lm_head.")),
    *((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm.", "visual.")),
)
"""(beginning of a name on disk, what the name begins with in the sources of parameters)."""

MIXTRAL, CORRECTION = ".block_sparse_moe.", ".mlp.e_score_correction_bias"
RENAMED = (
    (MIXTRAL, ".mlp."),
    (CORRECTION, ".mlp.gate.e_score_correction_bias"),
    *((f".{theirs}.", f".{ours}.") for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))),
)
"""(part of a name of Mixtral or MiniMax, the part in the sources of parameters)."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj$")
_LAYER = re.compile(r"\.layers\.\d+\.")


def canonical(name: str) -> str:
    """A tensor's name as sources of parameters have it."""
    name = next((to + name.removeprefix(prefix) for prefix, to in PREFIXES if name.startswith(prefix)), name)
    if MIXTRAL in name or CORRECTION in name:
        for part, ours in RENAMED:
            name = f"{name}.".replace(part, ours)[:-1]
    return name


def formats_in(directory: Path, *, decodes_only: bool = False) -> Formats | None:
    """The formats of the matrices of a quantised checkpoint; None for one of floats, FP8 with its scales included.

    Args:
        decodes_only: whether the model only decodes, what others prefilled.

    Raises:
        CheckpointError: the description is malformed, or names a type, a method or a setting that is not read here.
    """
    path = directory / DESCRIPTION
    if not path.exists():
        return _from_config(directory)
    try:
        values = read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    _check_version(path, values)
    group = values.get("group_size", 0)
    if not isinstance(group, int) or group < 0:
        raise CheckpointError(f"{path}: group_size is {group!r}; expected a number of weights, 0 for all of an output channel")
    types: dict[str, dict[str, str]] = {}
    for name, kind in values.items():
        if isinstance(kind, str) and name.endswith(".weight"):
            types.setdefault(_matrix(name), {})[name] = kind
    forms = {matrix: _form(path, kinds, decodes_only) for matrix, kinds in types.items()}
    _refuse_others(path, values)
    biased = _biased(directory, values, set(forms))
    rotated, caches = bool(values.get("is_rot_used")), tuple(_caches(path, values))
    return Formats(tuple(_rules(forms)), stored=True, group=group, biased=biased, kv_cache=caches, rotated=rotated)


ROTATION = Path("optional", "quarot.safetensors")
"""The rotation of the hidden states of a rotated model, for what else reads them (ModelSlim's QuaRot with `export_extra_info`)."""


def rotated_by(directory: Path) -> Path | None:
    """The file that says that the hidden states of a checkpoint are rotated; None where none does.

    Raises:
        CheckpointError: the description is malformed.
    """
    path = directory / DESCRIPTION
    try:
        optional = read_json(path).get("optional") if path.exists() else None
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if isinstance(optional, Mapping) and optional.get("quarot"):
        return path
    return directory / ROTATION if (directory / ROTATION).exists() else None


_CACHES = {"C8": INT8_STATIC}
_KEY_SCALE = ".k_proj.kv_cache_scale"
_ATTENTION, _INDEXER = ".quant_type", ".indexer.quant_type"
# ModelSlim 26.1 writes the second where queries and keys alone are rounded, vllm-ascend reads the first.
_INDEXERS = {"INT8_DYNAMIC": INT8, "QK_INT8_DYNAMIC": INT8, "FLOAT": FLOAT, "BF16": FLOAT}


def _caches(path: Path, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The formats of the caches of attention layers, of which the scales of keys are named, and of indexers.

    Of indexers some are named and others not, which are float; where none is, one word is of all.
    """
    forms: dict[str, str] = {}
    indexers: dict[str, str] = {}
    for name, kind in values.items():
        if name.endswith(_KEY_SCALE):
            if kind not in _CACHES:
                raise CheckpointError(f"{path}: {name} is {kind}; legal are {', '.join(_CACHES)}")
            forms[canonical(name).removesuffix(_KEY_SCALE)] = _CACHES[kind]
        elif name.endswith(_INDEXER):
            if kind not in _INDEXERS:
                raise CheckpointError(
                    f"{path}: {name} is {kind!r}: keys of indexers are not rounded so here; legal are {', '.join(_INDEXERS)}"
                )
            indexers[canonical(name).removesuffix(_ATTENTION)] = _INDEXERS[kind]
    if values.get("indexer_quant_type") and not indexers:
        indexers[INDEXERS] = INT8
    yield from _rules(forms)
    yield from ((name, form) for name, form in indexers.items() if form != FLOAT)


def _check_version(path: Path, values: Mapping[str, Any]) -> None:
    version = values.get("version")
    if version not in (*VERSIONS, None):
        raise CheckpointError(f"{path}: version is {version!r}; legal is {', '.join(VERSIONS)}")
    int4 = next((name for name, kind in values.items() if kind == "W4A8_DYNAMIC"), None)
    if version is None and int4 is not None:
        raise CheckpointError(f"{path}: {int4} is W4A8_DYNAMIC, and there is no version; legal for int4 is version {', '.join(VERSIONS)}")


def _from_config(directory: Path) -> Formats | None:
    found, group = forms_in(directory)
    forms = {canonical(matrix): form for matrix, form in found.items()}
    if all(form == FLOAT for form in forms.values()):
        return None
    kinds: dict[str, dict[str, str]] = {}
    for matrix, form in forms.items():
        kinds.setdefault(_matrix(matrix), {})[matrix] = form
    merged = {matrix: _only(directory / "config.json", each) for matrix, each in kinds.items()}
    return Formats(tuple(_rules(merged)), stored=True, group=group)


_BIAS = ".bias"


def _biased(directory: Path, values: Mapping[str, Any], matrices: Set[str]) -> tuple[str, ...]:
    """Patterns of what has a bias: smoothing that shifts activations (`anti_method: m4`) leaves one at norms and at what reads them.

    It also leaves zeros where it shifted nothing, which are not worth an addition.
    """
    names = [name for name in values if name.endswith(_BIAS)]
    if not names:
        return ()
    tensors = open_checkpoint(directory).tensors
    absent = [name for name in names if name not in tensors]
    if absent:
        raise CheckpointError(f"{directory}: tensor {absent[0]} is missing; {DESCRIPTION} names it")
    added = {canonical(name).removesuffix(_BIAS) for name in names if bool(tensors[name].read().any())}
    families: dict[str, set[str]] = {}
    for matrix in matrices:
        families.setdefault(_LAYER.sub(".layers.*.", matrix), set()).add(matrix)
    patterns: list[str] = []
    for pattern, members in families.items():
        patterns += [pattern] if members <= added else sorted(members & added)
    return tuple(patterns)


def _matrix(name: str) -> str:
    """The matrix that a tensor is part of; the experts of a layer are one."""
    stem = canonical(name).removesuffix(".weight")
    expert = _EXPERT.fullmatch(stem)
    if expert is None:
        return stem
    return f"{expert[1]}.{'down_proj' if expert[2] == 'down' else 'gate_up_proj'}"


def _only(path: Path, kinds: Mapping[str, str]) -> str:
    if len(set(kinds.values())) > 1:
        (one, first), (other, second) = next((a, b) for a in kinds.items() for b in kinds.items() if a[1] != b[1])
        raise CheckpointError(f"{path}: {one} is {first} and {other} is {second}; experts of a layer are one matrix and must have one type")
    return next(iter(kinds.values()))


def _form(path: Path, kinds: Mapping[str, str], decodes_only: bool) -> str:
    kind = _only(path, kinds)
    if kind == MIXED:
        return W8A8 if decodes_only else W8A8_DYNAMIC
    if kind not in _TYPES:
        raise CheckpointError(f"{path}: {next(iter(kinds))} is {kind}; legal are {', '.join((*_TYPES, MIXED))}")
    return _TYPES[kind]


def _refuse_others(path: Path, values: Mapping[str, Any]) -> None:
    """Refuses what is said of no tensor and changes what a step computes."""
    settings.check(str(path), {name: value for name, value in values.items() if "." not in name}, settings.DESCRIPTION)
    for name, known in (("metadata", settings.METADATA), ("optional", settings.OPTIONAL)):
        settings.check(f"{path}: {name}", values.get(name) or {}, known)
    for name, kind in values.items():
        if name.endswith(_ATTENTION) and not name.endswith(_INDEXER) and kind != "FLOAT":
            raise CheckpointError(f"{path}: {name} is {kind!r}: int8 attention is not read here; legal is FLOAT")


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
