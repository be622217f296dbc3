"""The record by which a model family offers its functions: pure, over trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from ..graphs.types import Limits, Tree
from .variant import Variant

C = TypeVar("C", bound="ModelConfig")
H = TypeVar("H")
V = TypeVar("V")
H_contra = TypeVar("H_contra", contravariant=True)


class ModelConfig(Protocol):
    """What builds read of the configuration of any family, which is a frozen dataclass with a field `variant`.

    Attributes:
        num_key_value_heads: heads of the key-value pools; where a group has more ranks, each head has copies (`Variant.kv_repeat`).
        split_heads: numbers of other heads, by name; the ranks of a group share them, so their number must divide each.
        num_experts, num_experts_per_tok: 0 in a dense model.
        layer_kinds: kind of each layer; layers of one kind have the same operators.
        num_moe_layers: how many of the layers have experts.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def split_heads(self) -> Mapping[str, int]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def num_moe_layers(self) -> int: ...
    @property
    def variant(self) -> Variant: ...


class Intermediates(NamedTuple):
    """Intermediate values of a forward pass that others read.

    Attributes:
        features: [T, ...] for the draft head, laid out as the residual stream (sequence_parallel.py): the final hidden states for a
            multi-token-prediction head, those of several layers side by side for a head that reads inner layers.
        routers: router logits [T, E] of each MoE layer.
        streams: residual stream [T, M] that enters each layer, and the one that leaves the last; empty in a family that offers none.
        chosen: experts of each token [T, X] i32 of each MoE layer, laid out as the residual stream; empty without `Variant.tells_experts`.
    """

    features: torch.Tensor
    routers: list[torch.Tensor]
    streams: Sequence[torch.Tensor] = ()
    chosen: Sequence[torch.Tensor] = ()


class ExtendDraftCache(Protocol[H_contra]):
    """Writes tokens to the draft head's cache."""

    def __call__(
        self, cfg: H_contra, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, /, *, first: bool
    ) -> tuple[Tree, Tree]:
        """Writes tokens [B, Q], each the one that follows the token of its row of `hidden`.

        Args:
            params: of the model, without `layers`.
            state: the draft head's part.
            hidden: [T, ...] features of the model's pass, or what `DraftHead.draft` returned.
            first: whether `hidden` is of the model's pass: the first time in a step.

        Returns:
            what `DraftHead.draft` reads of each token, a tree of whole tensors [T, width], and the new state.
        """
        ...


@dataclass(frozen=True)
class DraftHead(Generic[H]):
    """How a family drafts.

    Writing to the cache and drafting are apart, so that of all tokens of a step only the last of each row goes through the whole head.

    Attributes:
        key: key of the head in the trees of parameters and of state; absent from them in a model without one.
        extend_cache: writes tokens to the head's cache.
        draft: (cfg, params, state, inputs, rows that `extend_cache` returned) -> the head's hidden states, a row for each of those,
            laid out as the residual stream; or these and further inputs of the step's later drafts, for this function and `extend_cache`.
        logits: (cfg, params, hidden) -> logits of those hidden states, over the head's vocabulary: the model's, [B, V], or its own.
        model_ids: (cfg, params, ids [B] i32 in the head's vocabulary) -> the model's ids [B] i32; None where both have one vocabulary.
        vocab_size: (cfg) -> number of ids in the head's vocabulary; None where it is the model's.
        declared_by: fields of config.json that say how many layers the head has, of which any may be there.
    """

    key: str
    extend_cache: ExtendDraftCache[H]
    draft: Callable[[H, Tree, Tree, Tree, Tree], torch.Tensor | tuple[torch.Tensor, Tree]]
    logits: Callable[[H, Tree, torch.Tensor], torch.Tensor]
    model_ids: Callable[[H, Tree, torch.Tensor], torch.Tensor] | None = None
    vocab_size: Callable[[H], int] | None = None
    declared_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tower(Generic[V]):
    """How a family reads pictures; checkpoints of one family have towers or not, and a text model reads nothing of them.

    Attributes:
        key: of its parameters, beside those of the language model.
        read_config: (fields of a config.json, its name in errors) -> the tower's configuration, None where the file has none; raises
            ConfigError naming the field.
        prepared: (cfg, mean and standard deviation of each channel, factor of the bytes that these are of) -> the configuration with them.
        abstract_params: (cfg, dtype) -> tree of Param.
        normalised: (cfg, patches u8, dtype) -> the patches that `encode` reads.
        encode: (cfg, params, inputs) -> a row of the language model's width for each place of a picture in a prompt.
        in_tiles: cfg -> the configuration whose parameters are stored as NPUs take them.
    """

    key: str
    read_config: Callable[[Mapping[str, Any], str], V | None]
    prepared: Callable[[V, Sequence[float], Sequence[float], float], V]
    abstract_params: Callable[[V, torch.dtype], Tree]
    normalised: Callable[[V, torch.Tensor, torch.dtype], torch.Tensor]
    encode: Callable[[V, Tree, Tree], torch.Tensor]
    in_tiles: Callable[[V], V]


@dataclass(frozen=True)
class Family(Generic[C]):
    """A model family: `FAMILY` of a module of this folder, or of a user's file (family_file.py).

    Its functions are a module's, so that a family can be pickled.

    Attributes:
        name: what manifests call it.
        model_types: values of `model_type` in config.json that it serves.
        read_config: (fields of a config.json, its name in errors) -> the family's configuration; raises ConfigError naming the field.
        abstract_params: (cfg, dtype) -> tree of Param.
        abstract_state: (cfg, limits, dtype) -> tree of Aval.
        forward: (cfg, params, state, inputs) -> hidden states [T, M] after the final norm, the new state, and intermediate values.
        head: (cfg, params, hidden states [T, M]) -> logits [T, V].
        shrink: (cfg, ranks of a group, all ranks) -> a configuration with few narrow layers of the same kinds in the same order, which the
            same mesh splits in the same way: what `verify` runs in place of the model (shrink.py).
        widths: most that a narrow model has of fields of config.json; the others stay (`npucompile models --reduce`).
        draft_head: None in a family that cannot draft.
        tower: None in a family that cannot read pictures.
    """

    name: str
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], str], C]
    abstract_params: Callable[[C, torch.dtype], Tree]
    abstract_state: Callable[[C, Limits, torch.dtype], Tree]
    forward: Callable[[C, Tree, Tree, Tree], tuple[torch.Tensor, Tree, Intermediates]]
    head: Callable[[C, Tree, torch.Tensor], torch.Tensor]
    shrink: Callable[[C, int, int], C]
    widths: Mapping[str, int] = field(hash=False)
    draft_head: DraftHead[C] | None = None
    tower: Tower[Any] | None = None

    @property
    def draft_key(self) -> str:
        """Key of the draft head in the trees of parameters and of state; "" in a family that cannot draft."""
        return self.draft_head.key if self.draft_head else ""
