"""Hybrid decoders of gated DeltaNet and gated attention layers, dense or MoE, with a multi-token-prediction head.

Most layers are gated DeltaNet layers (a recurrent state), some are gated full-attention layers (paged keys and values). Families differ
in their configuration files and in how their checkpoints order the rows of DeltaNet's projections. Rows of a parameter that belong on
one device are adjacent: key-value rows by kv head, DeltaNet projections by key head, SwiGLU halves in a dimension of their own. A shard
of the parameters is then the parameters of a smaller model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs.types import Limits, Tree
from . import attention, decoder, draft_vocabulary, feed_forward, gated_deltanet, mtp
from . import shrink as sizes
from .batch import Batch
from .config import Fields
from .config_fields import refuse_unknown
from .family import DraftHead, Intermediates
from .rotary import rotary_fields
from .routing import SOFTMAX, Routing

DRAFT = "mtp"
FULL, LINEAR = "full_attention", "linear_attention"

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)
_MOE_SIZES = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")

# Fields that not every model reads. `mamba_ssm_dtype` is of recurrent states, whose dtype is a deployment's (`Variant.recurrent`).
_SOMETIMES = frozenset({*_MOE_SIZES, "intermediate_size", "full_attention_interval", "mamba_ssm_dtype"})

# Fields of config.json of which only these values are implemented. The gate of attention is always a sigmoid; `output_gate_type` is of
# the gate of DeltaNet's norm, as vLLM and SGLang read it (transformers 5.23 does not, and computes a swish).
LEGAL: dict[str, tuple[bool | str | int, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_qk_norm": (True,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """Sizes of a hybrid model.

    Attributes:
        dense_layers: layers of an MoE model whose feed-forward is dense.
        fused_projections: of `gated_deltanet.DeltaNetSizes`.
    """

    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    shared_expert_intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0
    dense_layers: tuple[int, ...] = ()
    fused_projections: bool = False

    @property
    def norm_offset(self) -> float:
        """Norm weights are zero-centred, but for that of DeltaNet's gated norm."""
        return 1.0

    @property
    def attn_output_gate(self) -> bool:
        return True

    @property
    def split_heads(self) -> Mapping[str, int]:
        """Numbers of heads that the ranks of a group share."""
        return {"num_attention_heads": self.num_attention_heads, "linear_num_key_heads": self.linear_num_key_heads}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kinds of layers by mixer and feed-forward."""
        return tuple(f"{kind}_dense" if i in self.dense_layers else kind for i, kind in enumerate(self.layer_types))

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return len(self.layer_types) - len(self.dense_layers) if self.num_experts else 0

    @property
    def routing(self) -> Routing:
        return Routing(SOFTMAX, self.num_experts_per_tok, self.norm_topk_prob)

    def checks(self) -> list[tuple[bool | int, str]]:
        return [
            *attention.uneven(self),
            (self.head_dim % 2, "head_dim must be even"),
            (self.linear_num_value_heads % self.linear_num_key_heads, "linear_num_value_heads: a multiple of linear_num_key_heads"),
            (self.rotary.dim > self.head_dim, f"rotated are {self.rotary.dim} channels; legal are at most head_dim"),
            (not self.layer_types or bool(set(self.layer_types) - {FULL, LINEAR}), f"layer_types may hold {FULL!r} and {LINEAR!r}"),
            (self.num_experts_per_tok > self.num_experts, "num_experts_per_tok must not exceed num_experts"),
            (bool(self.dense_layers) and not self.intermediate_size, "layers without experts need an intermediate_size"),
            (self.mtp_num_hidden_layers not in (0, 1), "the number of multi-token-prediction layers must be 0 or 1"),
        ]


def read_config(outer: Fields, text: Fields, **given: Any) -> Config:
    """Reads what the files of hybrid families have in common.

    Args:
        outer: the whole file, which may say whether embeddings are tied.
        text: fields of the text model.
        given: further fields of the configuration, which the family reads.

    Raises:
        ConfigError: naming the field.
    """
    experts = text.get(int, "num_experts", "num_local_experts", default=0, minimum=0)
    dense = not experts or given.get("dense_layers")
    required = (*_SIZES, *(_MOE_SIZES if experts else ()), *(("intermediate_size",) if dense else ()))
    read: dict[str, Any] = {name: text.get(int, name, minimum=1) for name in required}
    read |= rotary_fields(text, read["head_dim"], read, partial=0.25)
    config = Config(
        layer_types=_layer_types(text),
        rms_norm_eps=text.get(float, "rms_norm_eps", minimum=0),
        tie_word_embeddings=outer.get(bool, "tie_word_embeddings", default=text.get(bool, "tie_word_embeddings", default=False)),
        num_experts=experts,
        **read,
        **given,
    )
    refuse_unknown(outer, text, _SOMETIMES)
    return config


def _layer_types(text: Fields) -> tuple[str, ...]:
    if (types := text.kinds("layer_types", FULL, LINEAR)) is not None:
        return types
    interval = text.get(int, "full_attention_interval", default=4, minimum=1)
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(text.num_layers()))


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param: shapes, dtypes, logical axes, initialisation and checkpoint sources.

    Keys: those of `decoder.params`, and `mtp` (the draft head, where the model has one).
    """
    layers = [_layer_params(cfg, dtype, f"model.layers.{i}.", kind, i in cfg.dense_layers) for i, kind in enumerate(cfg.layer_types)]
    params = decoder.params(cfg, dtype, layers)
    if cfg.mtp_num_hidden_layers:
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        params[DRAFT] = mtp.params(cfg, dtype, norms, "mtp.fc.weight", _layer_params(cfg, dtype, "mtp.layers.0.", FULL, joined=False))
    return params


def _layer_params(cfg: Config, dtype: torch.dtype, prefix: str, kind: str, dense: bool = False, *, joined: bool = True) -> dict[str, Tree]:
    if kind == FULL:
        mixer = attention.params(cfg, dtype, prefix + "self_attn.", joined=joined)
    else:
        mixer = gated_deltanet.params(cfg, dtype, prefix + "linear_attn.")
    mlp = feed_forward.params(cfg, dtype, prefix + "mlp.", dense=dense)
    return decoder.layer_params(cfg, dtype, prefix, mixer, mlp)


def abstract_state(cfg: Config, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval: the pools of each layer and, where the model has the draft head, those of its one full-attention layer (`mtp`)."""
    layers = [
        attention.state(cfg, limits, dtype, f"model.layers.{i}.self_attn.") if kind == FULL else gated_deltanet.state(cfg, limits, dtype)
        for i, kind in enumerate(cfg.layer_types)
    ]
    state: dict[str, Any] = {"layers": layers}
    if cfg.mtp_num_hidden_layers:
        state[DRAFT] = attention.state(cfg, limits, dtype)
    return state


def forward(cfg: Config, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Intermediates]:
    """Runs all layers over one step; results are those of `decoder.forward`.

    Args:
        params: tree of `abstract_params`; `head` and `mtp` are not read.
        state: tree of `abstract_state`; `mtp` passes through.
        inputs: LAYER_INPUTS of a step (graphs/steps/).
    """
    return decoder.forward(cfg, _layers(cfg), params, state, Batch.of(inputs, cfg.rotary), inputs)


def _layers(cfg: Config) -> Sequence[tuple[str, decoder.Mixer]]:
    mixers = (attention.apply if kind == FULL else gated_deltanet.apply for kind in cfg.layer_types)
    return list(zip(cfg.layer_kinds, mixers, strict=True))


def extend_draft_cache(cfg: Config, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
    """Writes the multi-token-prediction head's keys and values, from the hidden state of token i and the id of token i+1.

    Arguments are those of `family.ExtendDraftCache`; rows are the head's residual `stream` and its layer's normalised input `normed`, each
    [T, M], whole on every device. `first` changes nothing: the head treats hidden states of the model and its own alike.
    """
    own, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    stream, x = mtp.merged(cfg, own, params["embed"], batch, inputs, hidden)
    pool = attention.write_kv(cfg, own["layer"]["mixer"], state[DRAFT], batch, x)
    return {"stream": stream, "normed": x}, {**state, DRAFT: pool}


def draft(cfg: Config, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor:
    """Runs the head's layer over tokens that are in its cache: all of a row's, or some at its end.

    Results and arguments are those of `DraftHead.draft`; of `inputs["tokens"]` only the shape is read.
    """
    own, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    mixed = attention.attend(cfg, own["layer"]["mixer"], state[DRAFT], batch, rows["normed"])
    return mtp.finished(cfg, own, batch, mixed, rows["stream"])


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`."""
    layers = sizes.layers(cfg.layer_kinds)
    delta, values = sizes.split(cfg.linear_num_key_heads, tp), min(2, cfg.linear_num_value_heads // cfg.linear_num_key_heads)
    return replace(
        cfg,
        **sizes.feed_forwards(cfg, tp, ranks),
        **sizes.heads(cfg, tp),
        layer_types=cfg.layer_types[:layers],
        dense_layers=tuple(i for i in cfg.dense_layers if i < layers),
        linear_num_key_heads=delta,
        linear_num_value_heads=delta * values,
        linear_key_head_dim=sizes.HEAD,
        linear_value_head_dim=sizes.HEAD,
        shared_expert_intermediate_size=sizes.ffn(tp) if cfg.shared_expert_intermediate_size else 0,
    )


WIDTHS = {**sizes.WIDTHS, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 64}
"""`Family.widths` of hybrid families."""

DRAFT_HEAD = DraftHead(DRAFT, extend_draft_cache, draft, decoder.draft_logits, vocab_size=draft_vocabulary.size)
"""The multi-token-prediction head, for `Family.draft_head`."""
