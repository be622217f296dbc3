"""The Qwen3.5 text models, dense and MoE: configuration, parameters, state, forward pass and draft head.

Layers alternate: three gated DeltaNet layers (a recurrent state), then one gated full-attention layer (paged keys and
values). Rows of a parameter that belong on one device are adjacent: key-value rows by kv head, DeltaNet projections by key head, SwiGLU
halves in a dimension of their own. A shard of the parameters is then the parameters of a smaller model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import ConfigError
from ..graphs.ir.block import block
from ..graphs.types import Aval, Limits, Tree
from . import feed_forward, gated_attention, gated_deltanet, sequence_parallel
from .batch import Batch
from .config import Fields
from .family import DraftHead, Family, Intermediates
from .params import Param, Source
from .rotary import Rotary, read_rotary
from .routing import SOFTMAX, Routing
from .variant import PLAIN, Variant

NAME = "qwen3_5"
DRAFT = "mtp"
FULL, LINEAR = "full_attention", "linear_attention"
MOST_LAYERS = 1024

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

# Fields of config.json of which only these values are implemented. `output_gate_type` has no effect on the attention gate, which is
# always a sigmoid (as in transformers 5.23); the gate of DeltaNet's norm is a swish.
_LEGAL: dict[str, tuple[bool | str, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "sigmoid"),
    "mtp_use_dedicated_embeddings": (False,),
}


@dataclass(frozen=True)
class Config:
    """Sizes of a Qwen3.5 text model; field names follow its config.json.

    With num_experts == 0 the model is dense and has an intermediate_size; otherwise it is MoE and has the moe_ and shared_ sizes.
    `variant` is not in the file: it is how a deployment stores parameters and state.
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rotary: Rotary
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0
    variant: Variant = PLAIN

    @property
    def routing(self) -> Routing:
        """Every model of the family makes the weights of a token's experts sum to 1."""
        return Routing(SOFTMAX, self.num_experts_per_tok, renormalise=True)

    def __post_init__(self) -> None:
        checks = [
            (self.num_attention_heads % self.num_key_value_heads, "num_attention_heads must be a multiple of num_key_value_heads"),
            (
                self.num_attention_heads % (self.num_key_value_heads * self.variant.kv_repeat),
                f"num_attention_heads must be a multiple of num_key_value_heads times their {self.variant.kv_repeat} copies",
            ),
            (self.head_dim % 2, "head_dim must be even"),
            (self.linear_num_value_heads % self.linear_num_key_heads, "linear_num_value_heads: a multiple of linear_num_key_heads"),
            (self.rotary.dim > self.head_dim, f"rotated are {self.rotary.dim} channels; legal are at most head_dim"),
            (not self.layer_types or set(self.layer_types) - {FULL, LINEAR}, f"layer_types may hold {FULL!r} and {LINEAR!r}"),
            (self.num_experts_per_tok > self.num_experts, "num_experts_per_tok must not exceed num_experts"),
            (self.mtp_num_hidden_layers not in (0, 1), "mtp_num_hidden_layers must be 0 or 1"),
        ]
        for broken, rule in checks:
            if broken:
                raise ConfigError(f"{NAME}: {rule}; the configuration is {self}")

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head."""
        return self.rotary.dim

    @staticmethod
    def from_hf(values: Mapping[str, Any], where: str = "config.json") -> Config:
        """Reads the fields of a Hugging Face config.json, bare text model or wrapped in `text_config`.

        Raises:
            ConfigError: naming the field.
        """
        outer = Fields(values, where)
        text = outer.sub("text_config") if outer.has("text_config") else outer
        for name, legal in _LEGAL.items():
            text.only(name, *legal)
        experts = text.get(int, "num_experts", "num_local_experts", default=0, minimum=0)
        required = _SIZES + (_MOE_SIZES if experts else ("intermediate_size",))
        sizes: dict[str, Any] = {name: text.get(int, name, minimum=1) for name in required}
        rotary = read_rotary(text, sizes["head_dim"], partial=0.25)
        sizes["max_position_embeddings"] = rotary.longest(sizes["max_position_embeddings"])
        return Config(
            layer_types=_layer_types(text),
            rotary=rotary,
            rms_norm_eps=text.get(float, "rms_norm_eps", minimum=0),
            tie_word_embeddings=outer.get(bool, "tie_word_embeddings", default=text.get(bool, "tie_word_embeddings", default=False)),
            num_experts=experts,
            mtp_num_hidden_layers=text.get(int, "mtp_num_hidden_layers", default=0, minimum=0),
            **sizes,
        )


def _layer_types(text: Fields) -> tuple[str, ...]:
    count = text.get(int, "num_hidden_layers", minimum=1)
    if count > MOST_LAYERS:
        raise ConfigError(f"{text.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS}")
    types = text.values.get("layer_types")
    if types is None:
        interval = text.get(int, "full_attention_interval", default=4, minimum=1)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if not isinstance(types, (list, tuple)) or len(types) != count or not all(kind in (FULL, LINEAR) for kind in types):
        raise ConfigError(f"{text.where}: layer_types is {types!r}; expected {count} of {FULL!r} and {LINEAR!r}")
    return tuple(types)


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param: shapes, dtypes, logical axes, initialisation and checkpoint sources.

    Keys: `embed`, `layers`, `norm`, `head` (absent when tied to `embed`), `mtp` (the draft head, where the model has one).
    """

    def plain(name: str, *shape: int, axes: tuple[str | None, ...] = (), init: str = "normal") -> Param:
        return Param(Aval(shape, dtype, axes), Source((name,), (shape,)), init)

    M, V = cfg.hidden_size, cfg.vocab_size
    params: dict[str, Any] = {
        "embed": plain("model.embed_tokens.weight", V, M, axes=("vocab", None), init="embedding"),
        "layers": [_layer_params(cfg, dtype, f"model.layers.{i}.", kind) for i, kind in enumerate(cfg.layer_types)],
        "norm": plain("model.norm.weight", M, init="zeros"),
    }
    if not cfg.tie_word_embeddings:
        params["head"] = plain("lm_head.weight", V, M, axes=("vocab", None))
    if cfg.mtp_num_hidden_layers:
        params[DRAFT] = {
            "norm_embedding": plain("mtp.pre_fc_norm_embedding.weight", M, init="zeros"),
            "norm_hidden": plain("mtp.pre_fc_norm_hidden.weight", M, init="zeros"),
            "fc": plain("mtp.fc.weight", M, 2 * M),
            "layer": _layer_params(_unquantised(cfg), dtype, "mtp.layers.0.", FULL, joined=False),
            "norm": plain("mtp.norm.weight", M, init="zeros"),
        }
    return params


def _unquantised(cfg: Config) -> Config:
    """The configuration of the draft head's layer, which no published recipe quantises."""
    grouped = cfg.variant.experts != PLAIN.experts
    return replace(cfg, variant=replace(cfg.variant, attention="plain", experts="grouped" if grouped else "plain"))


def _layer_params(cfg: Config, dtype: torch.dtype, prefix: str, kind: str, *, joined: bool = True) -> dict[str, Any]:
    norm = Aval((cfg.hidden_size,), dtype)
    if kind == FULL:
        mixer = gated_attention.params(cfg, dtype, prefix + "self_attn.", joined=joined)
    else:
        mixer = gated_deltanet.params(cfg, dtype, prefix + "linear_attn.")
    return {
        "input_norm": Param(norm, Source((prefix + "input_layernorm.weight",), (norm.shape,)), "zeros"),
        "mixer": mixer,
        "post_norm": Param(norm, Source((prefix + "post_attention_layernorm.weight",), (norm.shape,)), "zeros"),
        "mlp": (feed_forward.moe_params if cfg.num_experts else feed_forward.dense_params)(cfg, dtype, prefix + "mlp."),
    }


def abstract_state(cfg: Config, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval: the pools of each layer and, where the model has the draft head, those of its one full-attention layer (`mtp`)."""
    mixers = [(gated_attention if kind == FULL else gated_deltanet) for kind in cfg.layer_types]
    state: dict[str, Any] = {"layers": [mixer.state(cfg, limits, dtype) for mixer in mixers]}
    if cfg.mtp_num_hidden_layers:
        state[DRAFT] = gated_attention.state(cfg, limits, dtype)
    return state


def forward(cfg: Config, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Intermediates]:
    """Runs all layers over one step.

    Args:
        params: tree of `abstract_params`; `head` and `mtp` are not read.
        state: tree of `abstract_state`; `mtp` passes through.
        inputs: LAYER_INPUTS of a step (graphs/step_inputs.py).

    Returns:
        hidden [T, M] after the final norm, laid out as the residual stream (sequence_parallel.py), the new state, and intermediate
        values, of which the draft head's features are the same hidden states.
    """
    batch = Batch.of(inputs, cfg.rotary)
    stream = sequence_parallel.embed(batch.tokens, params["embed"])
    layers = params["layers"]
    norms = [*(layer["input_norm"] for layer in layers[1:]), params["norm"]]
    x = ops.rms_norm(stream, layers[0]["input_norm"], cfg.rms_norm_eps, 1.0)
    pools, routers = [], []
    for kind, layer, pool, next_norm in zip(cfg.layer_types, layers, state["layers"], norms, strict=True):
        x, stream, pool, logits = block(kind, _layer, (cfg, kind), layer, pool, batch, x, stream, next_norm)
        pools.append(pool)
        routers.extend(logits)
    return x, {**state, "layers": pools}, Intermediates(x, routers)


def _layer(
    cfg: Config, kind: str, layer: Tree, pool: Tree, batch: Batch, x: torch.Tensor, stream: torch.Tensor, next_norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Tree, list[torch.Tensor]]:
    """One layer from its normalised input to the next layer's: each residual add is fused with the norm that follows it."""
    mixer = gated_attention if kind == FULL else gated_deltanet
    mixed, pool = mixer.apply(cfg, layer["mixer"], pool, batch, x)
    x, stream, routers = _feed_forward(cfg, layer, batch.size * batch.q_len, mixed, stream, next_norm)
    return x, stream, pool, routers


def _feed_forward(
    cfg: Config, layer: Tree, tokens: int, mixed: torch.Tensor, stream: torch.Tensor, next_norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The layer after its mixer: residual add and norm, feed-forward, residual add and the next layer's norm."""
    x, stream = ops.add_rms_norm(mixed, stream, layer["post_norm"], cfg.rms_norm_eps, 1.0)
    routers = []
    if cfg.num_experts:
        x, logits = feed_forward.moe(cfg, layer["mlp"], x)
        routers.append(logits)
    else:
        x = feed_forward.dense(layer["mlp"], x, tokens)
    x, stream = ops.add_rms_norm(x, stream, next_norm, cfg.rms_norm_eps, 1.0)
    return x, stream, routers


def head(cfg: Config, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of final hidden states: [T, M] -> [T, V], split over the vocabulary where the layout splits it."""
    logits: torch.Tensor = ops.linear(hidden, params["embed"] if cfg.tie_word_embeddings else params["head"])
    return logits


def extend_draft_cache(cfg: Config, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
    """Writes the multi-token-prediction head's keys and values, from the hidden state of token i and the id of token i+1.

    Args:
        params: tree of `abstract_params` with `embed` and `mtp`.
        state: tree of `abstract_state` with `mtp`.
        inputs: as for forward, `tokens` shifted left by one: entry (b, t) is the token after that of row (b, t) of `hidden`.
        hidden: [T, M], laid out as the residual stream: from `forward`, or from `draft`.
        first: whether it is from `forward`; this head treats both alike.

    Returns:
        what `draft` continues from, all of it on every device: the head's residual stream `stream` and its layer's normalised input
        `normed`, each [T, M]; and the new state.
    """
    mtp, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    token = ops.rms_norm(sequence_parallel.embed(batch.tokens, params["embed"]), mtp["norm_embedding"], cfg.rms_norm_eps, 1.0)
    hidden = ops.rms_norm(hidden, mtp["norm_hidden"], cfg.rms_norm_eps, 1.0)
    stream = sequence_parallel.whole(ops.linear(torch.cat([token, hidden], -1), mtp["fc"]), batch.size * batch.q_len)
    x = ops.rms_norm(stream, mtp["layer"]["input_norm"], cfg.rms_norm_eps, 1.0)
    pool = gated_attention.write_kv(_unquantised(cfg), mtp["layer"]["mixer"], state[DRAFT], batch, x)
    return {"stream": stream, "normed": x}, {**state, DRAFT: pool}


def draft(cfg: Config, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor:
    """Runs the multi-token-prediction head's layer over tokens that are in its cache already.

    Args:
        params, state: as for `extend_draft_cache`.
        inputs: of those tokens: all of a row's, or some at its end; of `tokens` only the shape is read.
        rows: their rows of what `extend_draft_cache` returned.

    Returns:
        hidden [T, M], laid out as the residual stream: input of `head`, and of the next `extend_draft_cache`.
    """
    batch = Batch.of(inputs, cfg.rotary)
    cfg, mtp = _unquantised(cfg), params[DRAFT]
    mixed = gated_attention.attend(cfg, mtp["layer"]["mixer"], state[DRAFT], batch, rows["normed"])
    return _feed_forward(cfg, mtp["layer"], batch.size * batch.q_len, mixed, sequence_parallel.spread(rows["stream"]), mtp["norm"])[0]


FAMILY = Family(
    name=NAME,
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    read_config=Config.from_hf,
    abstract_params=abstract_params,
    abstract_state=abstract_state,
    forward=forward,
    head=head,
    draft_head=DraftHead(DRAFT, extend_draft_cache, draft, head),
)
