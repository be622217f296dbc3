"""Compares what a checkpoint's files say of its model with the sizes that an artifact was built of, where no digest binds the two."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ...graphs.errors import CheckpointError
from ...lowering.artifact.artifact import Artifact
from ...models import registry
from ...models.draft_source import recorded, with_draft_model
from ...models.family_file import FamilyFile
from ...models.rotary import SECTIONS
from ..artifact_model import full_model
from ..builder.pictures import processor_of, video_processor_of

_NOT_COMPUTED = {
    "variant", "family", "draft_family", "max_position_embeddings", "positions", "tie_word_embeddings", "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
}  # fmt: skip
"""How a deployment stores a model, what is said of contexts, and what tensors say themselves: which heads there are."""

_NAMES = {"theta": "rope_theta", "dim": "partial_rotary_factor", "scaling": "rope_scaling", "sections": "mrope_section"}
"""Fields of config.json by those of `models.rotary.Rotary`."""

_CONFIG = "config.json"


def check_same_model(artifact: Artifact, directory: Path) -> None:
    """Refuses a checkpoint whose tensors have the shapes that an artifact's graphs read, and whose model computes something else of them.

    Raises:
        CheckpointError: naming the field and both values.
        ModelError: the files cannot be read.
    """
    manifest = artifact.manifest
    ours, served = full_model(manifest), registry.find(directory, FamilyFile.recorded(manifest.model))
    draft = recorded(manifest.model)
    if draft and draft.directory and draft.directory.is_dir():
        served = with_draft_model(served, draft.directory)
    if ours.family.name != served.model.family.name:
        _refuse(artifact, directory, _CONFIG, ("the family", ours.family.name, served.model.family.name))
    pictures = manifest.model.get("tower")
    for difference in _differences(ours.config, served.model.config, bool(pictures)):
        _refuse(artifact, directory, _CONFIG, difference)
    if (most := manifest.limits.max_model_len) > served.max_position_embeddings:
        _refuse(artifact, directory, _CONFIG, ("max_position_embeddings", f"a context of {most}", served.max_position_embeddings))
    if not pictures or ours.family.tower is None:
        return
    tower = ours.family.tower.read_config(json.loads(manifest.model["config"]), _CONFIG)
    if served.tower is None:
        _refuse(artifact, directory, _CONFIG, ("vision_config", "a tower", None))
    for difference in _differences(tower, served.tower, True):
        _refuse(artifact, directory, f"{_CONFIG}: vision_config", difference)
    for name, processor in (("processor", processor_of(served)[0]), ("videos", video_processor_of(served))):
        built, said = pictures.get(name), processor and dataclasses.asdict(processor)
        for field in {**(built or {}), **(said or {})}:
            pair = ((values or {}).get(field) for values in (built, said))
            one, other = (list(value) if isinstance(value, tuple) else value for value in pair)
            if one != other:
                _refuse(artifact, directory, f"the {name} of pictures", (field, one, other))


def _differences(ours: Any, theirs: Any, pictures: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name of a field, and its value in both, of all that differ and that decide what is computed."""
    for field in dataclasses.fields(ours):
        name, one, other = field.name, getattr(ours, field.name), getattr(theirs, field.name, None)
        if name == "sections":
            # Three axes of positions are apart in pictures alone.
            one, other = (one or SECTIONS, other or SECTIONS) if pictures else ((), ())
        if name in _NOT_COMPUTED or one == other:
            continue
        if name != "scaling" and dataclasses.is_dataclass(one) and dataclasses.is_dataclass(other):
            yield from _differences(one, other, pictures)
        else:
            yield _NAMES.get(name, name), one, other


def _refuse(artifact: Artifact, directory: Path, where: str, difference: tuple[str, Any, Any]) -> NoReturn:
    name, built, said = difference
    raise CheckpointError(
        f"{directory}: {where}: {name} is {said!r}; the graphs of {artifact.path} were built of sizes alone, with {built!r}: name the "
        f"checkpoint of {artifact.manifest.model['name']}, or build {directory}"
    )
