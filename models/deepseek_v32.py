"""The DeepSeek V3.2 models: those of V3, whose attention reads only the keys that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import deepseek_v3, sparse_latent_attention
from . import shrink as sizes
from .config import Fields

NAME = "deepseek_v32"
SMALL_HEADS, SMALL_TOPK = 32, 64
"""Of a small model's indexer; a proof runs prompts and contexts several times as long as the keys that it chooses."""


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.Config):
    """Sizes of a DeepSeek V3.2 model: those of V3 and of the indexer; field names follow its config.json.

    Attributes:
        indexer_rope_interleave: whether the indexer's heads are rotated in pairs, as those of another family are.
    """

    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    indexer_rope_interleave: bool = False

    @property
    def packs_latents(self) -> bool:
        return True

    @property
    def num_indexers(self) -> int:
        """How many layers have an indexer."""
        return len(self.layer_kinds)

    def mixer(self, kind: str) -> deepseek_v3.Mixer:
        return sparse_latent_attention

    def checks(self) -> list[tuple[bool | int, str]]:
        return [
            *super().checks(),
            (not self.q_lora_rank, "q_lora_rank: the indexer reads compressed queries"),
            (self.qk_rope_head_dim > self.index_head_dim or self.index_head_dim % 2, "index_head_dim must be even, and hold a rotary part"),
            (self.index_n_heads < 1 or self.index_topk < 1, "index_n_heads and index_topk must be positive"),
        ]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    # Another model has the field, and rotates the indexer's heads in pairs; these do not.
    fields.only("indexer_rope_interleave", False)
    # Every layer chooses keys of its own.
    fields.only("index_topk_freq", 1)
    return Config(**index_sizes(fields), **deepseek_v3.config_fields(fields))


def index_sizes(fields: Fields) -> dict[str, Any]:
    """Values of the fields of the indexer's sizes.

    Raises:
        ConfigError: naming the field.
    """
    fields.kinds("layer_types", "indexed_attention", "deepseek_sparse_attention")
    return {name: fields.get(int, name, minimum=1) for name in ("index_n_heads", "index_head_dim", "index_topk")}


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`, whose indexer chooses fewer keys than a small prompt has.

    It has heads enough that no two keys have the score zero, which a choice among them would turn on.
    """
    small = deepseek_v3.shrink(cfg, tp, ranks)
    assert isinstance(small, Config)
    return replace(
        small,
        index_n_heads=min(cfg.index_n_heads, SMALL_HEADS),
        index_head_dim=sizes.HEAD,
        index_topk=min(cfg.index_topk, SMALL_TOPK),
    )


FAMILY = replace(
    deepseek_v3.FAMILY,
    name=NAME,
    model_types=(NAME,),
    read_config=read_config,
    shrink=shrink,
    widths={**deepseek_v3.WIDTHS, "index_n_heads": 16},
)
