"""The skeleton of decoder-only models: embedding, layers that each add a mixer and a feed-forward block, final norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..graphs.errors import ConfigError
from ..graphs.ir.block import block
from ..graphs.types import Aval, Tree
from . import attention, draft_vocabulary, feed_forward, norms, quant, sequence_parallel
from .batch import Batch
from .family import Intermediates
from .params import Param, Source, norm
from .quant.formats import FLOAT
from .rotary import Rotary
from .variant import PLAIN, Variant

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names in checkpoints."""

Mixer = Callable[..., tuple[Any, ...]]
"""(cfg, weights, state, batch, x) -> the output before the residual add and the new state, as `attention.apply`; and one thing more, a tree
of tensors, if layers behind this one read it."""


class Layer(NamedTuple):
    """How a layer is run.

    Attributes:
        kind: names its body in graphs.
        mixer: a function of a module.
        reads: whether the mixer takes one argument more: what the last layer before it that returned such a thing passed on.
    """

    kind: str
    mixer: Mixer
    reads: bool = False


class DecoderSizes(feed_forward.MoeSizes, Protocol):
    """Fields of a model's configuration that the skeleton reads.

    `norm_offset` is added to the weight of every norm: 1 where checkpoints hold zero-centred weights.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def norm_offset(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def variant(self) -> Variant: ...


@dataclass(frozen=True, kw_only=True)
class Config(attention.PlainHeads):
    """Sizes that most models have; field names follow config.json. Without `num_experts` a model is dense.

    `variant` is not in the file: it is how a deployment stores parameters and state.

    Attributes:
        norm_topk_prob: whether the weights of a token's experts are made to sum to 1.
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    rotary: Rotary
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    variant: Variant = PLAIN

    def checks(self) -> list[tuple[bool | int, str]]:
        """(whether it is broken, rule) of each rule."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        for broken, rule in self.checks():
            if broken:
                raise ConfigError(f"{rule}; the configuration is {self}")


def params(cfg: DecoderSizes, dtype: torch.dtype, layers: Sequence[Tree]) -> dict[str, Any]:
    """Tree of Param of a model with these layers: `embed`, `layers`, `norm`, `head` where it is not tied to `embed`, and `draft_head` where
    drafts have a vocabulary of their own.

    A head that is not float is a parameter of its own even so: products read integers, and embeddings are looked up as floats.
    """
    M, V = cfg.hidden_size, cfg.vocab_size
    table = Aval((V, M), dtype, ("vocab", None))
    tree: dict[str, Any] = {
        "embed": Param(table, Source((EMBEDDING,), ((V, M),)), "embedding"),
        "layers": list(layers),
        "norm": norm("model.norm", M, dtype, cfg.norm_offset),
    }
    own = (HEAD,)
    instead = (EMBEDDING,) if cfg.tie_word_embeddings else ()
    tree |= draft_vocabulary.param(cfg, dtype, own, instead)
    if cfg.tie_word_embeddings and cfg.variant.formats.of(own) == FLOAT:
        return tree
    return {**tree, "head": Param(table, Source(own, ((V, M),), instead=instead), role="column")}


def layer_params(cfg: DecoderSizes, dtype: torch.dtype, prefix: str, mixer: Tree, mlp: Tree) -> dict[str, Tree]:
    """Parameters of a layer: those of its two blocks, each behind a norm; `prefix` begins their names in a checkpoint."""
    return {
        "input_norm": norm(prefix + "input_layernorm", cfg.hidden_size, dtype, cfg.norm_offset),
        "mixer": mixer,
        "post_norm": norm(prefix + "post_attention_layernorm", cfg.hidden_size, dtype, cfg.norm_offset),
        "mlp": mlp,
    }


def forward(
    cfg: DecoderSizes,
    layers: Sequence[Layer | tuple[str, Mixer]],
    params: Tree,
    state: Tree,
    batch: Batch,
    inputs: Tree | None = None,
) -> tuple[torch.Tensor, Tree, Intermediates]:
    """Runs all layers over one step.

    Args:
        layers: how each layer is run.
        params: tree of which `embed`, `layers` and `norm` are read.
        state: tree with the pools of each layer in `layers`; the rest passes through.
        inputs: that the batch is of; None where they have no pictures.

    Returns:
        hidden [T, M] after the final norm, laid out as the residual stream (sequence_parallel.py), the new state, and intermediate
        values, of which the features are the same hidden states and the streams those of all layers.
    """
    stream = sequence_parallel.embed_with_pictures(batch.tokens, params["embed"], inputs or {})
    following = [*(layer["input_norm"] for layer in params["layers"][1:]), params["norm"]]
    x = norms.rms_norm(stream, params["layers"][0]["input_norm"], cfg.rms_norm_eps, cfg.norm_offset)
    pools, routers, chosen, streams, passed = [], [], [], [stream], list[Tree]()
    for (kind, mixer, *reads), layer, pool, next_norm in zip(layers, params["layers"], state["layers"], following, strict=True):
        read = passed if any(reads) else []
        x, stream, pool, routed, more = block(kind, _layer, (cfg, mixer), layer, pool, batch, x, stream, next_norm, *read)
        passed = more or passed
        pools.append(pool)
        routers.extend(routed[:1])
        chosen.extend(routed[1:])
        streams.append(stream)
    return x, {**state, "layers": pools}, Intermediates(x, routers, streams, chosen)


def _layer(
    cfg: DecoderSizes,
    mixer: Mixer,
    layer: Tree,
    pool: Tree,
    batch: Batch,
    x: torch.Tensor,
    stream: torch.Tensor,
    next_norm: torch.Tensor,
    *read: Tree,
) -> tuple[torch.Tensor, torch.Tensor, Tree, list[torch.Tensor], list[Tree]]:
    """One layer from its normalised input to the next layer's: each residual add is fused with the norm that follows it."""
    mixed, pool, *passed = mixer(cfg, layer["mixer"], pool, batch, x, *read)
    x, stream, routers = after_mixer(cfg, layer, batch.size * batch.q_len, mixed, stream, next_norm)
    return x, stream, pool, routers, passed


def after_mixer(
    cfg: DecoderSizes, layer: Tree, tokens: int, mixed: torch.Tensor, stream: torch.Tensor, next_norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The rest of a layer: residual add and norm, feed-forward, residual add and the norm that follows the layer.

    Args:
        tokens: rows of the stream that are tokens.
        mixed: [T, M] output of the mixer.
        stream: [T, M] residual stream before it.

    Returns:
        the normalised stream, the stream, and what `feed_forward.apply` says of the layer's router.
    """
    x, stream = norms.add_rms_norm(mixed, stream, layer["post_norm"], cfg.rms_norm_eps, cfg.norm_offset)
    x, routers = feed_forward.apply(cfg, layer["mlp"], x, tokens)
    x, stream = norms.add_rms_norm(x, stream, next_norm, cfg.rms_norm_eps, cfg.norm_offset)
    return x, stream, routers


def head(cfg: DecoderSizes, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of final hidden states: [T, M] -> [T, V], split over the vocabulary where the layout splits it."""
    return quant.linear(hidden, params["head"] if "head" in params else params["embed"])


def draft_logits(cfg: DecoderSizes, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a draft: [B, M] -> [B, N] over the tokens that may be drafted (draft_vocabulary.py), split as those of `head` are."""
    return quant.linear(hidden, params[draft_vocabulary.KEY]) if draft_vocabulary.KEY in params else head(cfg, params, hidden)
