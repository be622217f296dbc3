"""The sizes of a model that its time and memory follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....models.draft_source import with_draft_model
from ....models.presets import DRAFT_PRESETS
from ....models.registry import ModelSource, find


@dataclass(frozen=True)
class Latent:
    """Latent attention: ranks of the compressed queries and keys, and widths of a head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Indexer:
    """What chooses the tokens that sparse attention reads: heads, their width, how many tokens, and the share of layers that choose."""

    heads: int
    dim: int
    tokens: int
    share: float = 1.0


@dataclass(frozen=True)
class LinearShape:
    """The delta rule: heads of keys and values, and their widths."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Draft:
    """A draft head: "mtp", which is one more layer of the model, or "eagle3", a dense layer of its own vocabulary."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        full_layers: with softmax attention, `linear_layers` the others.
        gated: queries are twice as wide, for a gate.
        dense_layers, dense_width: layers whose feed-forward has no experts, and its width.
        expert_layers, experts, per_token, expert_width, shared_width: layers with experts, of each so many, so many of them a token.
    """

    name: str
    hidden: int
    vocab: int
    full_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    linear_layers: int = 0
    linear: LinearShape | None = None
    dense_layers: int = 0
    dense_width: int = 0
    expert_layers: int = 0
    experts: int = 0
    per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    draft: Draft | None = None

    @property
    def layers(self) -> int:
        return self.full_layers + self.linear_layers

    @property
    def kind(self) -> str:
        """Whose kernels it needs: "sparse", "linear", "latent" or "grouped" attention."""
        if self.indexer is not None:
            return "sparse"
        if self.linear_layers:
            return "linear"
        return "latent" if self.latent else "grouped"


def shape_of(source: ModelSource | str) -> Shape:
    """The sizes of a preset or checkpoint, with the draft head that it has or that a public recipe trains for it.

    Raises:
        UnknownModel, ConfigError: as `models.registry.find`.
    """
    source = find(source) if isinstance(source, str) else source
    config: Any = source.model.config
    experts = int(getattr(config, "num_experts", 0))
    types = getattr(config, "layer_types", None)
    kinds = types or config.layer_kinds
    layers = len(kinds)
    dense = layers - config.num_moe_layers
    linear_layers = sum(kind == "linear_attention" for kind in types or ())
    latent = Latent(config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) if (
        hasattr(config, "kv_lora_rank")
    ) else None  # fmt: skip
    indexer = Indexer(config.index_n_heads, config.index_head_dim, config.index_topk, config.num_indexers / layers) if (
        hasattr(config, "index_topk")
    ) else None  # fmt: skip
    linear = LinearShape(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    ) if linear_layers else None  # fmt: skip
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    if getattr(config, "n_shared_experts", 0):
        shared = config.n_shared_experts * config.moe_intermediate_size
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim if latent else config.head_dim
    return Shape(
        source.name,
        config.hidden_size,
        config.vocab_size,
        layers - linear_layers,
        config.num_attention_heads,
        1 if latent else config.num_key_value_heads,
        head_dim,
        bool(types),
        latent,
        indexer,
        linear_layers,
        linear,
        dense,
        int(getattr(config, "intermediate_size", 0)) if dense else 0,
        layers - dense,
        experts,
        int(getattr(config, "num_experts_per_tok", 0)),
        int(getattr(config, "moe_intermediate_size", 0)) if experts else 0,
        int(shared) if experts else 0,
        _draft_of(source, config, latent, head_dim),
    )


def _draft_of(source: ModelSource, config: Any, latent: Latent | None, head_dim: int) -> Draft | None:
    if source.draft is None and source.has_draft_head:
        width = int(getattr(config, "intermediate_size", 0))
        kv_heads = 1 if latent else config.num_key_value_heads
        return Draft("mtp", config.num_attention_heads, kv_heads, head_dim, width, config.vocab_size)
    if source.draft is None:
        name = next((name for name, preset in DRAFT_PRESETS.items() if preset["target"] == source.name), None)
        if name is None:
            return None
        source = with_draft_model(source, name)
    fields = DRAFT_PRESETS[source.draft.name]["config"] if source.draft and source.draft.name in DRAFT_PRESETS else None
    if fields is None:
        return None
    return Draft(
        "eagle3",
        fields["num_attention_heads"],
        fields["num_key_value_heads"],
        fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]),
        fields["intermediate_size"],
        fields["draft_vocab_size"],
    )
