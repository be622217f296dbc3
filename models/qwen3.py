"""The Qwen3 models, dense and MoE: attention without a gate, and no draft head of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs.types import Limits, Tree
from . import attention, decoder, feed_forward
from . import shrink as sizes
from .batch import Batch
from .config import Fields
from .config_fields import refuse_unknown
from .family import Family, Intermediates
from .rotary import rotary_fields
from .routing import SOFTMAX, Routing

NAME = "qwen3"
DENSE, MOE = "dense", "moe"

_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
_MOE_SIZES = ("num_experts_per_tok", "moe_intermediate_size")

# Fields of config.json of which only these values are implemented.
_LEGAL: dict[str, tuple[bool | str | int, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
    "shared_expert_intermediate_size": (0,),
}

# Fields that not every model reads; windows are not read where no layer has one.
_SOMETIMES = frozenset({*_MOE_SIZES, "intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"})
_WINDOWS = frozenset({"sliding_window", "max_window_layers"})


@dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """Sizes of a Qwen3 model.

    Attributes:
        layer_kinds: the feed-forward of each layer, "dense" or "moe".
        head_norms: of queries and keys, as `attention.params` takes it (llama.py has none, minimax.py one of all heads).
        biased: whether the projections of queries, keys and values add biases (llama.py).
        routing_kind: of the router (minimax.py).
    """

    num_key_value_heads: int
    head_dim: int
    layer_kinds: tuple[str, ...]
    head_norms: str = attention.EACH
    biased: bool = False
    routing_kind: str = SOFTMAX

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.layer_kinds.count(MOE)

    @property
    def routing(self) -> Routing:
        return Routing(self.routing_kind, self.num_experts_per_tok, self.norm_topk_prob)

    @property
    def shared_expert_intermediate_size(self) -> int:
        """No layer has a shared expert."""
        return 0

    def checks(self) -> list[tuple[bool | int, str]]:
        return [
            *attention.uneven(self),
            (self.head_dim % 2, "head_dim must be even"),
            (self.num_experts_per_tok > self.num_experts, "num_experts_per_tok must not exceed num_experts"),
            (MOE in self.layer_kinds and not self.num_experts, "layers with experts need num_experts"),
            (
                self.head_norms == attention.ALL and bool(self.variant.heads),
                "heads that are normalised together are not padded: ranks must share them evenly",
            ),
            (DENSE in self.layer_kinds and not self.intermediate_size, "layers without experts need an intermediate_size"),
        ]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    fields.only_legal(_LEGAL)
    fields.kinds("layer_types", "full_attention")
    experts = fields.get(int, "num_experts", "num_local_experts", default=0, minimum=0)
    dense = fields.dense_layers() if experts else tuple(range(fields.num_layers()))
    required = (*_SIZES, *(_MOE_SIZES if experts else ()), *(("intermediate_size",) if dense else ()))
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in required}
    read |= rotary_fields(fields, read["head_dim"], read)
    config = Config(
        layer_kinds=tuple(DENSE if i in dense else MOE for i in range(fields.num_layers())),
        rms_norm_eps=fields.get(float, "rms_norm_eps", minimum=0),
        tie_word_embeddings=fields.get(bool, "tie_word_embeddings", default=False),
        num_experts=experts,
        # Published files say true, and the default of transformers is false: a file must say which.
        norm_topk_prob=fields.get(bool, "norm_topk_prob") if experts else True,
        **read,
    )
    refuse_unknown(fields, fields, _SOMETIMES | _WINDOWS)
    return config


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param; keys are those of `decoder.params`."""
    layers = []
    for i, kind in enumerate(cfg.layer_kinds):
        prefix = f"model.layers.{i}."
        mixer = attention.params(cfg, dtype, prefix + "self_attn.", head_norms=cfg.head_norms, biased=cfg.biased)
        mlp = feed_forward.params(cfg, dtype, prefix + "mlp.", dense=kind == DENSE)
        layers.append(decoder.layer_params(cfg, dtype, prefix, mixer, mlp))
    return decoder.params(cfg, dtype, layers)


def abstract_state(cfg: Config, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval: the pools of each layer."""
    return {"layers": [attention.state(cfg, limits, dtype, f"model.layers.{i}.self_attn.") for i in range(len(cfg.layer_kinds))]}


def forward(cfg: Config, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Intermediates]:
    """Runs all layers over one step; results are those of `decoder.forward`.

    Args:
        params: tree of `abstract_params`; `head` is not read.
        state: tree of `abstract_state`.
        inputs: LAYER_INPUTS of a step (graphs/steps/).
    """
    layers = [(kind, attention.apply) for kind in cfg.layer_kinds]
    return decoder.forward(cfg, layers, params, state, Batch.of(inputs, cfg.rotary), inputs)


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`."""
    return replace(
        cfg,
        **sizes.feed_forwards(cfg, tp, ranks),
        **sizes.heads(cfg, tp),
        layer_kinds=cfg.layer_kinds[: sizes.layers(cfg.layer_kinds)],
    )


FAMILY = Family(
    name=NAME,
    model_types=("qwen3", "qwen3_moe"),
    read_config=read_config,
    abstract_params=abstract_params,
    abstract_state=abstract_state,
    forward=forward,
    head=decoder.head,
    shrink=shrink,
    widths=sizes.WIDTHS,
)
