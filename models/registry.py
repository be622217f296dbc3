"""Looks up the model of a preset name or of a checkpoint directory."""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..graphs.errors import ConfigError, FamilyError, UnknownModel
from ..graphs.paths import directory_named
from .checkpoint import holds_any, open_checkpoint
from .config import Fields, read_json
from .directories import dangling, missing, name_of
from .draft_model import Config as WithDraftModel
from .draft_model import DraftSource
from .end_tokens import end_tokens, special_token, tokenizer_file
from .family import Family
from .family_file import FamilyFile, check_config
from .presets import BUNDLED, PRESETS, TOWERS
from .safetensors_files import has_weights
from .step import Model
from .tied_head import as_stored
from .variant import PLAIN

_HERE = Path(__file__).parent

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (2**-126, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
"""Sampling parameters of a generation_config.json and their least and largest values, which are those of requests; a top_k of -1 is off."""


@dataclass(frozen=True)
class ModelSource:
    """A model, and the files and facts that its preset or checkpoint directory has of it.

    Attributes:
        name: what users call it: the preset, or the directory's name.
        model: the family's functions with this configuration.
        checkpoint_dir: directory of the weights; None for a preset without weights.
        tokenizer: its tokenizer.json, or Kimi's tiktoken.model; None where there is neither.
        eos_ids: token ids that end a response, all that any file names (end_tokens.py); empty where none names any.
        text: the config.json, as JSON with sorted keys: `from_config(name, json.loads(text))` equals `model`. Whether the head is the
            embedding is as the checkpoint stores it (tied_head.py).
        chat_template: text of its chat template, in Jinja, or None where there is none.
        special_tokens: texts of the special tokens that chat templates name, such as bos_token.
        sampling: sampling parameters that generation_config.json recommends: SAMPLING.
        draft: the second checkpoint that its draft head is of, or None.
        family_file: the file that its family is of; None where this package has it.
        eos_files: which files name each of `eos_ids`.
    """

    name: str
    model: Model
    checkpoint_dir: Path | None
    tokenizer: Path | None
    eos_ids: tuple[int, ...]
    text: str
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)
    draft: DraftSource | None = None
    family_file: FamilyFile | None = None
    eos_files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens, prompt and output together, that the model supports."""
        return int(self.model.config.max_position_embeddings)

    @cached_property
    def tower(self) -> Any:
        """Configuration of its vision tower; None in a family without one, and where the file describes none.

        Raises:
            ConfigError: naming the field.
        """
        tower = self.model.family.tower
        return tower and tower.read_config(json.loads(self.described().text), "config.json")

    def described(self) -> ModelSource:
        """The same whose text describes its vision tower, too: that of a preset is of its text alone."""
        if self.checkpoint_dir is not None or self.family_file is not None or self.name not in TOWERS:
            return self
        values = json.loads(self.text)
        if "vision_config" in values:
            return self
        return replace(self, text=_text({"model_type": values["model_type"], "text_config": values, **TOWERS[self.name]}))

    def has_tower(self) -> bool:
        """Whether its checkpoint has any of the tower that the file describes: many that were made for text have none.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        tower, directory = self.model.family.tower, self.checkpoint_dir
        if tower is None or self.tower is None or directory is None or not has_weights(directory):
            return False
        return holds_any(open_checkpoint(directory), tower.abstract_params(self.tower, torch.float32))

    @property
    def has_draft_head(self) -> bool:
        """Whether programs of the model can draft: many checkpoints lack the head that their configuration declares.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        if not self.model.has_draft_head or self.checkpoint_dir is None or self.draft is not None:
            return self.model.has_draft_head
        if not has_weights(self.checkpoint_dir):
            return True
        params = self.model.family.abstract_params(self.model.config, torch.float32)[self.model.family.draft_key]
        return holds_any(open_checkpoint(self.checkpoint_dir), params)


def presets() -> tuple[str, ...]:
    """Names that `find` accepts beside directories."""
    return (*PRESETS, *BUNDLED)


def find(name_or_path: str | Path, family: FamilyFile | None = None) -> ModelSource:
    """The model of a preset name or of a Hugging Face checkpoint directory.

    Args:
        family: the family's file, for a family that this package does not have.

    Raises:
        UnknownModel: when it is neither, or config.json names a model type that the family, or no family here, serves.
        ConfigError: when config.json, generation_config.json or tokenizer_config.json is malformed, naming the field.
        FamilyError: when the family's file cannot be used.
    """
    name = str(name_or_path)
    if name in PRESETS:
        model = from_config(name, PRESETS[name], f"preset {name}", family)
        return ModelSource(name, model, None, None, (), _text(PRESETS[name]), family_file=family)
    if name in BUNDLED:
        return _from_directory(name, _HERE / "bundled" / name, family)
    if path := directory_named(name):
        return _from_directory(name_of(path), path, family)
    near = difflib.get_close_matches(name.lower(), presets(), n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UnknownModel(
        f"{name!r} is neither a preset nor a directory{hint}; presets are {', '.join(presets())}, "
        "and the path of a checkpoint directory that holds config.json is legal too"
    )


def published_name(source: ModelSource) -> str:
    """The preset that has a model's configuration, whatever its directory is called; without one the model's own name.

    A rotation scaled to longer contexts, which people add to a file, and how a deployment stores parameters make no other model; of
    presets that differ in their rotations alone it is the one with the model's, if there is one.
    """
    if source.name in PRESETS or source.family_file:
        return source.name
    own = _comparable(source.model)
    alike = [name for name in PRESETS if _comparable(from_config(name, PRESETS[name])) == own]
    same = [name for name in alike if from_config(name, PRESETS[name]).config.rotary == source.model.config.rotary]
    return (*same, *alike, source.name)[0]


def _comparable(model: Model) -> Any:
    config: Any = model.config.target if isinstance(model.config, WithDraftModel) else model.config
    return replace(config, rotary=replace(config.rotary, scaling=None, positions=0, sections=()), max_position_embeddings=0, variant=PLAIN)


def from_config(name: str, values: Mapping[str, Any], where: str = "config.json", family: FamilyFile | None = None) -> Model:
    """The model that the fields of a config.json describe.

    Args:
        family: the family's file, for a family that this package does not have.

    Raises:
        UnknownModel: when no family serves its model_type, or the file's does not.
        ConfigError: naming the field that is missing, malformed or unsupported.
        FamilyError: when the family's file cannot be used.
    """
    config, legal = Fields(values, where), families() if family is None else (own_family(family),)
    by_type = {model_type: each for each in legal for model_type in each.model_types}
    model_type = config.get(str, "model_type") if config.has("model_type") else _type_of_class(config, by_type)
    if model_type not in by_type:
        whose = "is not supported" if family is None else f"is not served by the family {legal[0].name} of {family.path}"
        other = "; --family FILE.py names a family of your own" if family is None else ""
        raise UnknownModel(f"{where}: model_type {model_type!r} {whose}; legal are {', '.join(by_type)}{other}")
    chosen, values = by_type[model_type], {**values, "model_type": model_type}
    if family is None:
        return Model(name, chosen, chosen.read_config(values, where))
    with family.blamed():
        read = chosen.read_config(values, where)
        check_config(read, family.path)
        model = Model(name, chosen, read)
        # Once, so that what a declaration lacks is said with the file's line.
        model.params(torch.float32)
    return model


def own_family(file: FamilyFile) -> Family[Any]:
    """The family of a user's file.

    Raises:
        FamilyError: it cannot be used, or has the name of a family of this package.
    """
    family, names = file.load(), [each.name for each in families()]
    if family.name in names:
        raise FamilyError(f"{file.path}: FAMILY.name is {family.name!r}, a family of npucompile; legal is any but {', '.join(names)}")
    return family


def families() -> tuple[Family[Any], ...]:
    """`FAMILY` of each module of this folder that has one."""
    modules = (importlib.import_module(f".{module.name}", __package__) for module in pkgutil.iter_modules([str(_HERE)]))
    records = (getattr(module, "FAMILY", None) for module in modules)
    return tuple(record for record in records if isinstance(record, Family))


def _type_of_class(config: Fields, model_types: Iterable[str]) -> str:
    """The model type of a file without one, from its class name up to `For`: `Qwen3_5Moe` is qwen3_5_moe; an unknown one unchanged."""
    classes = config.values.get("architectures")
    if not isinstance(classes, list | tuple) or not classes or not isinstance(classes[0], str):
        raise ConfigError(f"{config.where}: model_type is missing, and architectures is {classes!r}; one of them must name the model")
    stem = classes[0].partition("For")[0]
    return next((name for name in model_types if name.replace("_", "") == stem.replace("_", "").lower()), stem)


def _from_directory(name: str, directory: Path, family: FamilyFile | None) -> ModelSource:
    # A tokenizer or a file of defaults that is not there is left out; one that should be there is not.
    if link := dangling(directory, ".json", ".jinja", ".model"):
        raise ConfigError(f"{link}: {missing(link)}")
    values = as_stored(read_json(directory / "config.json"), directory)
    model = from_config(name, values, str(directory / "config.json"), family)
    ends = end_tokens(directory, values)
    return ModelSource(
        name=name,
        model=model,
        checkpoint_dir=directory,
        tokenizer=tokenizer_file(directory),
        eos_ids=tuple(ends),
        eos_files=ends,
        text=_text(values),
        chat_template=_chat_template(directory),
        special_tokens=_special_tokens(directory),
        sampling=_sampling(directory),
        family_file=family,
    )


def _chat_template(directory: Path) -> str | None:
    """From chat_template.jinja, which transformers prefers, or tokenizer_config.json; of several the one named default."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as UTF-8 text: {error}") from None
    value = read_json(config).get("chat_template") if config.is_file() else None
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
    except (TypeError, KeyError):
        raise ConfigError(f"{config}: chat_template is {value!r}; expected a text, or a list of objects with name and template") from None
    default = named.get("default")
    if default is not None and not isinstance(default, str):
        raise ConfigError(f"{config}: the chat_template named default is {default!r}; expected a text")
    return default


def _special_tokens(directory: Path) -> dict[str, str]:
    texts = {name: special_token(directory, name) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _sampling(directory: Path) -> dict[str, float]:
    """From generation_config.json, for servers; its do_sample is a setting of transformers' own loop."""
    path = directory / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    found = {name: values[name] for name in SAMPLING if values.get(name) is not None}
    for name, value in found.items():
        least, most = SAMPLING[name]
        kinds = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            legal = "an integer" if name == "top_k" else "a number"
            raise ConfigError(f"{path}: {name} is {value!r}; expected {legal} from {least:g} to {most:.10g}, or null")
    return {name: value for name, value in found.items() if (name, value) != ("top_k", -1)}


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)
