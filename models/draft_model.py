"""A model that drafts with the head of a second checkpoint: one family of both, whose programs are those of any other model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..graphs.types import Limits, Tree
from .family import DraftHead, Family, Intermediates, ModelConfig
from .head_padding import widened
from .step import Model
from .variant import PLAIN, Variant

DRAFT = "draft"
"""Key of the head in the trees of parameters and of state."""

PREFIX = "draft_model."
"""What names of the second checkpoint's tensors begin with in the sources of parameters."""


class DraftConfig(Protocol):
    """What builds read of a draft head's configuration, which is a frozen dataclass with a field `variant`; as in `ModelConfig`."""

    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def split_heads(self) -> Mapping[str, int]: ...
    @property
    def variant(self) -> Variant: ...


D = TypeVar("D", bound=DraftConfig)


@dataclass(frozen=True)
class DraftFamily(Generic[D]):
    """A family of draft heads with checkpoints of their own: `DRAFT_FAMILY` of a module of this folder.

    Attributes:
        name: what manifests call it.
        architectures: values of `architectures` in config.json that it serves.
        read_config: (fields of a config.json, its name in errors, the target's configuration, which of `optional` the checkpoint has)
            -> the head's configuration; raises ConfigError naming the field, and where it does not fit the target both sides.
        abstract_params: (cfg, dtype) -> tree of Param, whose names on disk begin with PREFIX.
        abstract_state: (cfg, limits, dtype) -> tree of Aval.
        features: (cfg, intermediate values of the target's pass) -> what the head reads of them.
        head: its functions, which read parameters and state under the key DRAFT, and beside it parameters of the target.
        shrink: (cfg, the target's small configuration, ranks of a group) -> a small configuration, as `Family.shrink`.
        optional: tensors that a checkpoint may lack.
        not_read: tensors that are deliberately not read, each with the reason.
        canonical: name of a tensor on disk -> the name that it has in most checkpoints.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], str, ModelConfig, Collection[str]], D]
    abstract_params: Callable[[D, torch.dtype], Tree]
    abstract_state: Callable[[D, Limits, torch.dtype], Tree]
    features: Callable[[D, Intermediates], torch.Tensor]
    head: DraftHead[D]
    shrink: Callable[[D, ModelConfig, int], D]
    optional: tuple[str, ...]
    not_read: Mapping[str, str] = field(hash=False)
    canonical: Callable[[str], str]


@dataclass(frozen=True)
class DraftSource:
    """A draft head's configuration, and the files and facts of its preset or checkpoint directory.

    Attributes:
        name: what users call it: the preset, or the directory's name.
        directory: of the weights; None for a preset.
        text: the config.json, as JSON with sorted keys.
        parts: which of `DraftFamily.optional` its checkpoint has.
    """

    name: str
    directory: Path | None
    text: str
    parts: tuple[str, ...]

    @staticmethod
    def of_fields(fields: Mapping[str, Any]) -> DraftSource:
        """What `as_fields` gave."""
        directory = fields["checkpoint"]
        return DraftSource(str(fields["name"]), Path(directory) if directory else None, str(fields["config"]), tuple(fields["parts"]))

    def as_fields(self) -> dict[str, Any]:
        """As plain values, with the absolute path of the directory."""
        directory = str(self.directory.resolve()) if self.directory else None
        return {"name": self.name, "config": self.text, "parts": list(self.parts), "checkpoint": directory}


@dataclass(frozen=True)
class Config:
    """The configuration of a model and of its draft head; what is not said here is the model's.

    Attributes:
        target, draft: configurations of both, in the variant of this one.
        family, draft_family: the functions of both.
    """

    target: Any
    draft: Any
    family: Family[Any] = field(repr=False)
    draft_family: DraftFamily[Any] = field(repr=False)
    variant: Variant = PLAIN

    def __post_init__(self) -> None:
        of_draft = replace(self.variant, kv_repeat=self.variant.draft_kv_repeat, heads=self.variant.draft_heads)
        object.__setattr__(self, "target", replace(self.target, variant=self.variant))
        object.__setattr__(self, "draft", replace(self.draft, variant=of_draft))

    def __getattr__(self, name: str) -> Any:
        # Only for what is not found; a copy that is being made has no fields yet.
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target, name)

    @property
    def split_heads(self) -> Mapping[str, int]:
        """Numbers of heads that the ranks of a group share."""
        return {**self.target.split_heads, **{f"draft {name}": count for name, count in self.draft.split_heads.items()}}

    def widened(self) -> Config:
        """Both with padded numbers of heads."""
        return replace(self, target=widened(self.target), draft=widened(self.draft))


def attach(model: Model, family: DraftFamily[Any], config: Any) -> Model:
    """The model with that draft head in place of its own, if it has one.

    Args:
        config: the head's, as `family.read_config` read it for this model.
    """
    both = Config(model.config, config, model.family, family, replace(model.config.variant, draft_kv_repeat=config.variant.kv_repeat))
    functions = Family(
        name=f"{model.family.name}+{family.name}",
        model_types=model.family.model_types,
        read_config=model.family.read_config,
        abstract_params=abstract_params,
        abstract_state=abstract_state,
        forward=forward,
        head=head,
        shrink=shrink,
        widths=model.family.widths,
        draft_head=_HEAD,
        tower=model.family.tower,
    )
    return replace(model, family=functions, config=both)


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param: the model's without those of a draft head of its own, and the head's under DRAFT."""
    return {**_without_head(cfg, cfg.family.abstract_params(cfg.target, dtype)), DRAFT: cfg.draft_family.abstract_params(cfg.draft, dtype)}


def abstract_state(cfg: Config, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval, with the keys of `abstract_params`."""
    pools = _without_head(cfg, cfg.family.abstract_state(cfg.target, limits, dtype))
    return {**pools, DRAFT: cfg.draft_family.abstract_state(cfg.draft, limits, dtype)}


def _without_head(cfg: Config, values: Tree) -> Tree:
    return {name: value for name, value in values.items() if name != cfg.family.draft_key}


def forward(cfg: Config, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Intermediates]:
    """The model's pass, as `Family.forward`, with the features that the head reads."""
    hidden, after, intermediates = cfg.family.forward(cfg.target, params, state, inputs)
    if DRAFT not in state:
        return hidden, after, intermediates
    return hidden, after, intermediates._replace(features=cfg.draft_family.features(cfg.draft, intermediates))


def head(cfg: Config, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """The model's logits."""
    return cfg.family.head(cfg.target, params, hidden)


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`."""
    target = cfg.family.shrink(cfg.target, tp, ranks)
    return replace(cfg, target=target, draft=cfg.draft_family.shrink(cfg.draft, target, tp))


def _extend_cache(cfg: Config, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
    return cfg.draft_family.head.extend_cache(cfg.draft, params, state, inputs, hidden, first=first)


def _draft(cfg: Config, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor | tuple[torch.Tensor, Tree]:
    return cfg.draft_family.head.draft(cfg.draft, params, state, inputs, rows)


def _logits(cfg: Config, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    return cfg.draft_family.head.logits(cfg.draft, params, hidden)


def _model_ids(cfg: Config, params: Tree, ids: torch.Tensor) -> torch.Tensor:
    own = cfg.draft_family.head.model_ids
    return ids if own is None else own(cfg.draft, params, ids)


def _vocab_size(cfg: Config) -> int:
    own = cfg.draft_family.head.vocab_size
    return int(cfg.vocab_size) if own is None else own(cfg.draft)


_HEAD = DraftHead(DRAFT, _extend_cache, _draft, _logits, _model_ids, _vocab_size)
