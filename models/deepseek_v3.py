"""The DeepSeek V3 and R1 models: latent attention, experts chosen in groups by sigmoids, and a draft head stored as one more layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Protocol

import torch

from ..graphs.types import Aval, Limits, Tree
from . import decoder, draft_vocabulary, feed_forward, latent_attention, mtp, quant
from . import shrink as sizes
from .batch import Batch
from .config import Fields
from .config_fields import refuse_unknown
from .family import DraftHead, Family, Intermediates
from .params import Param, Source
from .rotary import rotary_fields
from .routing import SIGMOID, Routing

NAME = "deepseek_v3"
DRAFT = "mtp"
DENSE, MOE, OF_DRAFT = "dense", "moe", "moe_draft"
EH_PROJ = "eh_proj.weight"
"""Of the draft head alone, among the layers of a checkpoint."""

OWN_HEAD, ROTATION = "shared_head.head.weight", "rot.weight"
"""The draft head's output head, and what turns its hidden states where they are rotated (`mtp.ROTATION`)."""

SMALL_SCALE = 0.3
"""Most of `routed_scaling_factor` in a small model; 1, which graphs leave out, stays."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
_MOE_SIZES = ("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
_DECLARED_BY = ("num_nextn_predict_layers", "num_mtp_layers")

# Fields of config.json of which only these values are implemented.
LEGAL: dict[str, tuple[bool | str | int, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_LEGAL = {**LEGAL, "attention_bias": (False,), "use_qk_norm": (False,)}

# Fields that not every model reads, and widths that follow from others.
SOMETIMES = frozenset(
    {*_MOE_SIZES, "intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace"}
)
_FOLLOWING = frozenset({"head_dim", "qk_head_dim"})


class Mixer(Protocol):
    """A module of functions like `latent_attention`: what a layer's attention is made of."""

    def params(self, cfg: Any, dtype: torch.dtype, prefix: str, /) -> Mapping[str, Tree]: ...
    def state(self, cfg: Any, limits: Limits, dtype: torch.dtype, prefix: str, /) -> dict[str, Aval]: ...
    def apply(self, cfg: Any, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor, /) -> tuple[torch.Tensor, Tree]: ...
    def compress(self, cfg: Any, weights: Tree, x: torch.Tensor, batch: Batch, /) -> tuple[Tree, Tree]: ...
    def write(self, cfg: Any, weights: Tree, state: Tree, batch: Batch, entries: Tree, /) -> Tree: ...
    def attend(self, cfg: Any, weights: Tree, state: Tree, batch: Batch, rows: Tree, /) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class MoeConfig(decoder.Config):
    """Sizes that do not depend on a layer's attention; `num_experts` is `n_routed_experts` in config.json.

    Attributes:
        layer_kinds: the feed-forward of each layer, "dense" or "moe", which the names of further kinds begin with.
        num_nextn_predict_layers: 1 where the model has the draft head, else 0.
    """

    layer_kinds: tuple[str, ...]
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0

    def mixer(self, kind: str) -> Mixer:
        """The module of the attention of a kind of layers; the draft head's layer is OF_DRAFT."""
        raise NotImplementedError

    def layer(self, kind: str) -> decoder.Layer:
        """How a kind of layers is run."""
        return decoder.Layer(kind, self.mixer(kind).apply)

    @property
    def num_moe_layers(self) -> int:
        """How many layers have experts."""
        return sum(not kind.startswith(DENSE) for kind in self.layer_kinds)

    @property
    def routing(self) -> Routing:
        return Routing(SIGMOID, self.num_experts_per_tok, self.norm_topk_prob, self.routed_scaling_factor, self.n_group, self.topk_group)

    @property
    def shared_expert_intermediate_size(self) -> int:
        """A checkpoint stores shared experts side by side, as one."""
        return self.moe_intermediate_size * self.n_shared_experts

    def checks(self) -> list[tuple[bool | int, str]]:
        each = self.num_experts // max(self.n_group, 1)
        without = len(self.layer_kinds) - self.num_moe_layers
        return [
            (self.num_moe_layers > 0 and not self.num_experts, "layers with experts need n_routed_experts"),
            (without > 0 and not self.intermediate_size, "layers without experts need an intermediate_size"),
            (self.num_experts % self.n_group, "n_routed_experts must be a multiple of n_group"),
            (self.topk_group > self.n_group, "topk_group must not exceed n_group"),
            (self.topk_group < self.n_group and each < 2, "a group must have two experts at least"),
            (self.num_experts_per_tok > each * self.topk_group, "num_experts_per_tok must not exceed the experts of topk_group groups"),
            (self.num_nextn_predict_layers not in (0, 1), "num_nextn_predict_layers must be 0 or 1"),
        ]


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    """Sizes of a DeepSeek V3 model.

    Attributes:
        q_lora_rank: 0 where queries are not compressed.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    @property
    def packs_latents(self) -> bool:
        """Whether attention reads int8 latents, which no fused one over all keys does."""
        return False

    def mixer(self, kind: str) -> Mixer:
        return latent_attention

    @property
    def num_key_value_heads(self) -> int:
        """Every query head has keys of its own; what is cached of them is shared."""
        return self.num_attention_heads

    def checks(self) -> list[tuple[bool | int, str]]:
        odd = self.rotary.dim != self.qk_rope_head_dim or self.rotary.dim % 2
        return [(odd, "qk_rope_head_dim must be even, and rotated whole"), *super().checks()]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    return Config(**config_fields(fields))


def config_fields(fields: Fields, outer: Fields | None = None) -> dict[str, Any]:
    """Values of the fields of `Config`.

    Args:
        fields: of the text model.
        outer: the whole file, where it wraps the text model.

    Raises:
        ConfigError: naming the field.
    """
    read = moe_fields(fields, _SIZES, _LEGAL)
    fields.only("num_key_value_heads", read["num_attention_heads"])
    read["q_lora_rank"] = fields.get(int, "q_lora_rank", default=0, minimum=1)
    read["rope_interleave"] = fields.get(bool, "rope_interleave", default=True)
    read |= rotary_fields(fields, read["qk_rope_head_dim"], read)
    refuse_unknown(outer or fields, fields, SOMETIMES | _FOLLOWING)
    return read


def moe_fields(fields: Fields, named: Sequence[str], legal: Mapping[str, tuple[bool | str | int, ...]]) -> dict[str, Any]:
    """Values of the fields of `MoeConfig` but its rotation, and of integers that a model has besides.

    Args:
        named: all integers that every model must have.
        legal: fields of which only these values are implemented.

    Raises:
        ConfigError: naming the field.
    """
    fields.only_legal(legal)
    layers = fields.num_layers()
    experts = fields.get(int, "n_routed_experts", "num_local_experts", default=0, minimum=0)
    dense = min(fields.get(int, "first_k_dense_replace", default=0, minimum=0), layers) if experts else layers
    kinds = tuple(DENSE if i < dense else MOE for i in range(layers))
    # transformers 5 writes both fields, and reads this one.
    if (types := fields.kinds("mlp_layer_types", DENSE, "sparse")) and experts:
        kinds = tuple(DENSE if kind == DENSE else MOE for kind in types)
    required = (*named, *(_MOE_SIZES if experts else ()), *(("intermediate_size",) if DENSE in kinds else ()))
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in required}
    if experts:
        read["norm_topk_prob"] = fields.get(bool, "norm_topk_prob")
        read["routed_scaling_factor"] = fields.get(float, "routed_scaling_factor", minimum=0)
        read["n_shared_experts"] = fields.get(int, "n_shared_experts", default=0, minimum=0)
    return {
        **read,
        "layer_kinds": kinds,
        "rms_norm_eps": fields.get(float, "rms_norm_eps", minimum=0),
        "tie_word_embeddings": fields.get(bool, "tie_word_embeddings", default=False),
        "num_experts": experts,
        "num_nextn_predict_layers": fields.get(int, *_DECLARED_BY, default=0, minimum=0),
    }


def abstract_params(cfg: MoeConfig, dtype: torch.dtype) -> Tree:
    """Tree of Param; keys are those of `decoder.params`, and `mtp` (the draft head, where the model has one)."""
    layers = [_layer_params(cfg, dtype, f"model.layers.{i}.", kind) for i, kind in enumerate(cfg.layer_kinds)]
    params, behind = decoder.params(cfg, dtype, layers), f"model.layers.{len(cfg.layer_kinds)}."
    rotated = cfg.variant.formats.rotated
    if cfg.num_nextn_predict_layers:
        params[DRAFT] = _draft_params(cfg, dtype, behind)
        if rotated:
            params |= draft_vocabulary.param(cfg, dtype, (behind + OWN_HEAD,), ())
    # A model that does not draft reads nothing of the head.
    final: Param = params["norm"]
    unread = (behind, *[ROTATION] * rotated)
    return {**params, "norm": replace(final, source=replace(final.source, unread=unread, unread_mark=behind + EH_PROJ))}


def _layer_params(cfg: MoeConfig, dtype: torch.dtype, prefix: str, kind: str) -> dict[str, Tree]:
    mixer = cfg.mixer(kind).params(cfg, dtype, prefix + "self_attn.")
    dense = kind.startswith(DENSE)
    mlp = feed_forward.params(cfg, dtype, prefix + "mlp.", dense=dense, shared="shared_experts", gated=False)
    return decoder.layer_params(cfg, dtype, prefix, mixer, mlp)


def _draft_params(cfg: MoeConfig, dtype: torch.dtype, prefix: str) -> dict[str, Tree]:
    """The draft head lies behind the layers, with copies of the embedding and of the head, which are the model's own.

    In a rotated model each output head has the weights of the norm before it in its columns, so that the draft head's is no copy.
    """
    embedding, own = prefix + "embed_tokens.weight", prefix + OWN_HEAD
    norms = (prefix + "enorm", prefix + "hnorm", prefix + "shared_head.norm")
    layer = _layer_params(cfg, dtype, prefix, OF_DRAFT)
    if not cfg.variant.formats.rotated:
        return mtp.params(cfg, dtype, norms, prefix + EH_PROJ, layer, unread=(embedding, own))
    M, V = cfg.hidden_size, cfg.vocab_size
    tree = mtp.params(cfg, dtype, norms, prefix + EH_PROJ, layer, unread=(embedding,))
    tree[mtp.ROTATION] = Param(Aval((M, M), dtype), Source((ROTATION,), ((M, M),)))
    if not cfg.variant.draft_vocab:
        tree["head"] = Param(Aval((V, M), dtype, ("vocab", None)), Source((own,), ((V, M),)), role="column")
    return tree


def abstract_state(cfg: MoeConfig, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval: the pools of each layer and, where the model has the draft head, those of its layer (`mtp`)."""
    kinds = (*cfg.layer_kinds, *([OF_DRAFT] if cfg.num_nextn_predict_layers else []))
    pools = [cfg.mixer(kind).state(cfg, limits, dtype, f"model.layers.{i}.self_attn.") for i, kind in enumerate(kinds)]
    return {"layers": pools, DRAFT: pools.pop()} if cfg.num_nextn_predict_layers else {"layers": pools}


def forward(cfg: MoeConfig, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Intermediates]:
    """Runs all layers over one step; results are those of `decoder.forward`.

    Args:
        params: tree of `abstract_params`; `head` and `mtp` are not read.
        state: tree of `abstract_state`; `mtp` passes through.
        inputs: LAYER_INPUTS of a step (graphs/steps/).
    """
    return decoder.forward(cfg, [cfg.layer(kind) for kind in cfg.layer_kinds], params, state, Batch.of(inputs, cfg.rotary), inputs)


def extend_draft_cache(
    cfg: MoeConfig, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool, kind: str = OF_DRAFT
) -> tuple[Tree, Tree]:
    """Writes what the draft head's layer caches, from the hidden state of token i and the id of token i+1.

    Arguments are those of `family.ExtendDraftCache`; rows are the head's residual `stream` [T, M] and what its layer's attention reads,
    whole on every device. `first` changes nothing: the head treats hidden states of the model and its own alike.

    Args:
        kind: of the layers whose attention writes.
    """
    own, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    stream, x = mtp.merged(cfg, own, params["embed"], batch, inputs, hidden)
    rows, entries = cfg.mixer(kind).compress(cfg, own["layer"]["mixer"], x, batch)
    pool = cfg.mixer(kind).write(cfg, own["layer"]["mixer"], state[DRAFT], batch, entries)
    return {"stream": stream, **rows}, {**state, DRAFT: pool}


def draft(cfg: MoeConfig, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor:
    """Runs the head's layer over tokens that are in its cache: all of a row's, or some at its end.

    Results and arguments are those of `DraftHead.draft`; of `inputs["tokens"]` only the shape is read.
    """
    own, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    mixed = cfg.mixer(OF_DRAFT).attend(cfg, own["layer"]["mixer"], state[DRAFT], batch, rows)
    return mtp.finished(cfg, own, batch, mixed, rows["stream"])


def draft_logits(cfg: MoeConfig, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """As `decoder.draft_logits`; by the head's own matrix where it has one."""
    own = params[DRAFT].get("head")
    return decoder.draft_logits(cfg, params, hidden) if own is None else quant.linear(hidden, own)


def shrink(cfg: Config, tp: int, ranks: int) -> Config:
    """A small configuration for `Family.shrink`."""
    return replace(
        cfg,
        **small_experts(cfg, tp, ranks),
        num_attention_heads=sizes.split(cfg.num_attention_heads, tp),
        q_lora_rank=2 * sizes.HEAD if cfg.q_lora_rank else 0,
        kv_lora_rank=2 * sizes.HEAD,
        qk_nope_head_dim=sizes.HEAD,
        qk_rope_head_dim=sizes.HEAD // 2,
        v_head_dim=sizes.HEAD,
        rotary=replace(cfg.rotary, dim=sizes.HEAD // 2),
    )


def small_experts(cfg: MoeConfig, tp: int, ranks: int) -> dict[str, Any]:
    """Fields of `MoeConfig` in a small configuration, with as many groups of two experts or more as divide them.

    Weights of sigmoids are nearly equal, so that a choice which rounding turns exchanges whole experts. Few layers, and experts that add
    little to the stream, keep that small beside what a wrong graph does.
    """
    small = sizes.feed_forwards(cfg, tp, ranks)
    groups = gcd(cfg.n_group, max(1, small["num_experts"] // 2))
    topk_group = max(1, groups * cfg.topk_group // cfg.n_group)
    return {
        **small,
        "num_experts_per_tok": min(small["num_experts_per_tok"], topk_group * (small["num_experts"] // groups)),
        # The shared expert is as wide as this, and split over a group where experts are not spread.
        "moe_intermediate_size": sizes.ffn(tp) if cfg.moe_intermediate_size else 0,
        "layer_kinds": sizes.runs(cfg.layer_kinds),
        "n_group": groups,
        "topk_group": topk_group,
        "routed_scaling_factor": 1.0 if cfg.routed_scaling_factor == 1 else min(cfg.routed_scaling_factor, SMALL_SCALE),
    }


WIDTHS = {
    **sizes.WIDTHS,
    "n_routed_experts": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
"""`Family.widths` of models with latent attention; latents and rotary parts stay as wide as an NPU's operators want them."""

DRAFT_HEAD: DraftHead[Any] = DraftHead(
    DRAFT, extend_draft_cache, draft, draft_logits, vocab_size=draft_vocabulary.size, declared_by=_DECLARED_BY
)
"""The draft head, for `Family.draft_head`."""

FAMILY: Family[Any] = Family(
    name=NAME,
    model_types=("deepseek_v3",),
    read_config=read_config,
    abstract_params=abstract_params,
    abstract_state=abstract_state,
    forward=forward,
    head=decoder.head,
    shrink=shrink,
    widths=WIDTHS,
    draft_head=DRAFT_HEAD,
)
