"""The GLM-4.5, 4.6 and 4.7 models: grouped attention with biases around the experts and the draft head of DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs.types import Aval, Limits, Tree
from . import attention, deepseek_v3
from . import shrink as sizes
from .batch import Batch
from .config import Fields
from .config_fields import refuse_unknown
from .deepseek_v3 import LEGAL, OF_DRAFT, SOMETIMES, moe_fields, small_experts
from .family import Family
from .rotary import rotary_fields

NAME = "glm4_moe"
_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.MoeConfig):
    """Sizes of a GLM-4 model.

    Attributes:
        attention_bias: whether the projections of queries, keys and values add biases.
        use_qk_norm: whether the heads of queries and keys are normalised.
    """

    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    use_qk_norm: bool = False

    def mixer(self, kind: str) -> deepseek_v3.Mixer:
        return _DRAFTING if kind == OF_DRAFT else _MIXER

    def checks(self) -> list[tuple[bool | int, str]]:
        return [*attention.uneven(self), (self.head_dim % 2, "head_dim must be even"), *super().checks()]


@dataclass(frozen=True)
class Grouped:
    """Grouped attention as a mixer; a draft head's writes its cache before it attends, and so its projections are apart."""

    joined: bool

    def params(self, cfg: Config, dtype: torch.dtype, prefix: str) -> dict[str, Tree]:
        norms = attention.EACH if cfg.use_qk_norm else attention.NONE
        return attention.params(cfg, dtype, prefix, joined=self.joined, head_norms=norms, biased=cfg.attention_bias)

    def state(self, cfg: Config, limits: Limits, dtype: torch.dtype, prefix: str) -> dict[str, Aval]:
        return attention.state(cfg, limits, dtype, prefix)

    @property
    def apply(self) -> Any:
        return attention.apply

    def compress(self, cfg: Config, weights: Tree, x: torch.Tensor, batch: Batch) -> tuple[Tree, Tree]:
        """Nothing is compressed: x is what is written and what attends."""
        return {"normed": x}, {"normed": x}

    def write(self, cfg: Config, weights: Tree, state: Tree, batch: Batch, entries: Tree) -> Tree:
        return attention.write_kv(cfg, weights, state, batch, entries["normed"])

    def attend(self, cfg: Config, weights: Tree, state: Tree, batch: Batch, rows: Tree) -> torch.Tensor:
        return attention.attend(cfg, weights, state, batch, rows["normed"])


_MIXER, _DRAFTING = Grouped(joined=True), Grouped(joined=False)


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields({"first_k_dense_replace": 1, **values}, where)
    read = moe_fields(fields, _SIZES, LEGAL)
    read["head_dim"] = fields.get(int, "head_dim", default=read["hidden_size"] // read["num_attention_heads"], minimum=1)
    read |= rotary_fields(fields, read["head_dim"], read, partial=0.5)
    read |= {name: fields.get(bool, name, default=False) for name in ("attention_bias", "use_qk_norm")}
    refuse_unknown(fields, fields, SOMETIMES)
    return Config(**read)


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`."""
    return replace(cfg, **small_experts(cfg, tp, ranks), **sizes.heads(cfg, tp))


FAMILY: Family[Any] = replace(
    deepseek_v3.FAMILY,
    name=NAME,
    model_types=(NAME,),
    read_config=read_config,
    shrink=shrink,
    widths={**sizes.WIDTHS, "n_routed_experts": 64},
)
