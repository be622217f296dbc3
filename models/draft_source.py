"""Finds the draft model that a user names, attaches it to its target, and opens the checkpoints of both as one."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..graphs.errors import CheckpointError, UnknownModel
from ..graphs.paths import directory_named
from .config import read_json
from .directories import name_of
from .draft_model import PREFIX, DraftFamily, DraftSource, attach
from .presets import DRAFT_PRESETS
from .quant.description import DESCRIPTION, rotated_by
from .registry import ModelSource
from .safetensors_files import CheckpointFiles, open_checkpoint
from .step import Model

_HERE = Path(__file__).parent


def with_draft_model(source: ModelSource, name_or_path: str | Path) -> ModelSource:
    """The model with the draft head of a preset name or of a checkpoint directory, in place of its own head if it has one.

    Raises:
        UnknownModel: it is neither, or no family here serves its architecture.
        ConfigError: its config.json is malformed, or the head does not fit the model.
        CheckpointError: its checkpoint is unreadable or quantised, or the model's hidden states are not those that a head reads.
    """
    name = str(name_or_path)
    if source.checkpoint_dir and (said := rotated_by(source.checkpoint_dir)):
        raise CheckpointError(
            f"--draft-model {name}: a draft head reads the hidden states that the model was trained with, and {said} says that those of "
            f"{source.name} are rotated (QuaRot), so that every draft would be refused; legal is a checkpoint that is not rotated, or no "
            "--draft-model"
        )
    if name in DRAFT_PRESETS:
        preset = DRAFT_PRESETS[name]
        draft = DraftSource(name, None, _text(preset["config"]), tuple(preset["parts"]))
        return replace(source, model=attached(source.model, preset["config"], draft.parts, f"preset {name}"), draft=draft)
    if not (path := directory_named(name)):
        raise UnknownModel(
            f"{name!r} is neither a preset of a draft model nor a directory; presets are {', '.join(DRAFT_PRESETS)}, "
            "and the path of a checkpoint directory is legal too"
        )
    values, where = read_json(path / "config.json"), str(path / "config.json")
    draft = DraftSource(name_of(path), path, _text(values), _parts(path, values, family_of(values, where)))
    return replace(source, model=attached(source.model, values, draft.parts, where), draft=draft)


def attached(model: Model, values: Mapping[str, Any], parts: Collection[str], where: str = "config.json") -> Model:
    """The model with the draft head that the fields of a config.json describe.

    Args:
        parts: as `DraftSource.parts`.

    Raises:
        UnknownModel: no family serves its architecture.
        ConfigError: naming the field that is malformed, unsupported or does not fit the model.
    """
    family = family_of(values, where)
    return attach(model, family, family.read_config(values, where, model.config, parts))


def family_of(values: Mapping[str, Any], where: str) -> DraftFamily[Any]:
    """The family of the draft head that the fields of a config.json describe.

    Raises:
        UnknownModel: there is none.
    """
    by_architecture = {name: family for family in draft_families() for name in family.architectures}
    named = values.get("architectures")
    first = named[0] if isinstance(named, list | tuple) and named else named
    if not isinstance(first, str) or first not in by_architecture:
        raise UnknownModel(f"{where}: the architecture is {first!r}; legal for a draft model are {', '.join(by_architecture)}")
    return by_architecture[first]


def draft_families() -> tuple[DraftFamily[Any], ...]:
    """`DRAFT_FAMILY` of each module of this folder that has one."""
    modules = (importlib.import_module(f".{module.name}", __package__) for module in pkgutil.iter_modules([str(_HERE)]))
    records = (getattr(module, "DRAFT_FAMILY", None) for module in modules)
    return tuple(record for record in records if isinstance(record, DraftFamily))


def recorded(model: Mapping[str, Any]) -> DraftSource | None:
    """The draft model of an artifact, from `Manifest.model`; None where it has none."""
    return DraftSource.of_fields(model["draft_model"]) if "draft_model" in model else None


def open_both(directory: Path, draft: DraftSource | None) -> CheckpointFiles:
    """The checkpoint of a model, with the tensors of its draft model under names that begin with PREFIX.

    Args:
        draft: None opens the model's alone.

    Raises:
        CheckpointError: a file is absent or unreadable, or the draft model has no checkpoint.
    """
    checkpoint = open_checkpoint(directory)
    if draft is None:
        return checkpoint
    place = draft.directory
    if place is None:
        raise CheckpointError(f"{draft.name} is a set of sizes without weights; legal is a path to the draft model's checkpoint directory")
    if not place.is_dir():
        raise CheckpointError(f"the draft model's checkpoint {place} is not there; legal is where it was when the artifact was built")
    second, family = open_checkpoint(place), family_of(json.loads(draft.text), str(place / "config.json"))
    tensors = dict(checkpoint.tensors)
    for name, entry in second.tensors.items():
        if family.canonical(name) in family.not_read:
            continue
        if (key := PREFIX + family.canonical(name)) in tensors:
            raise CheckpointError(f"{place}: {tensors[key].name} and {name} are both {family.canonical(name)}; expected one of them")
        tensors[key] = replace(entry, name=PREFIX + name)
    return CheckpointFiles(directory, (*checkpoint.files, *second.files), tensors, {PREFIX: place})


def _parts(directory: Path, values: Mapping[str, Any], family: DraftFamily[Any]) -> tuple[str, ...]:
    """Which optional tensors a checkpoint has."""
    if (directory / DESCRIPTION).exists() or values.get("quantization_config"):
        raise CheckpointError(f"{directory}: is quantised; legal is a draft model in floats")
    names = {family.canonical(name) for name in open_checkpoint(directory).tensors}
    return tuple(name for name in family.optional if name in names)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)
