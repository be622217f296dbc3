"""EAGLE-3 draft heads: one layer that reads the residual stream of several of the model's layers (arXiv:2503.01840).

Names and arithmetic are those of SafeAILab/EAGLE (eagle/model/cnets.py), as sgl-project/sglang 03d5a77 and vllm-project/vllm 00bd149 read
them (models/llama_eagle3.py). The head has a vocabulary of its own, of the tokens that texts use most.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import CheckpointError, ConfigError, ModelError
from ..graphs.types import Aval, Limits, Tree
from . import attention, feed_forward, sequence_parallel
from . import shrink as sizes
from .batch import Batch
from .config import Fields
from .config_fields import CONFIRMED, STORAGE, WITHOUT_EFFECT
from .draft_model import DRAFT, PREFIX, DraftFamily
from .family import DraftHead, Intermediates, ModelConfig
from .params import Param, Source, norm
from .rotary import Rotary, read_rotary
from .variant import PLAIN, Variant

EMBEDDING, OFFSETS = "embed_tokens.weight", "d2t"
"""Tensors that a checkpoint may lack: without an embedding the head reads the model's, without offsets it has the model's vocabulary."""

THETA = 1e4
"""Base of the rotation where the file does not say it: that of a Llama in transformers, and of SpecForge."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")

# Fields of config.json of which only these values are implemented.
_LEGAL: dict[str, tuple[bool | str, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "qkv_bias": (False,),
    "tie_word_embeddings": (False,),
    **CONFIRMED,
}

_READ = {
    *_SIZES, *_LEGAL, "architectures", "model_type", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings", "draft_vocab_size",
    "target_hidden_size", "norm_before_residual", "eagle_config", "eagle_aux_hidden_state_layer_ids",
}  # fmt: skip

# A head is one dense layer without windows, whatever its file says of experts and of windows that no layer has.
_WITHOUT_EFFECT = (WITHOUT_EFFECT - STORAGE) | {
    *("_name_or_path", "decoder_sparse_step", "max_window_layers", "mlp_only_layers", "sliding_window", "target_model_type"),
}


@dataclass(frozen=True)
class Config(attention.PlainHeads):
    """Sizes of an EAGLE-3 head; field names follow its config.json. Its one layer rotates heads whole and does not normalise them.

    Attributes:
        vocab_size, target_hidden_size: of the model.
        taps: layers of the model whose incoming residual streams the head reads; the number of layers means what leaves the last.
        norm_before_residual: whether the residual of the head's layer is normalised.
        own_embedding: whether the checkpoint has an embedding; else it is the model's.
        mapped: whether the checkpoint maps a vocabulary of its own to the model's.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary: Rotary
    rms_norm_eps: float
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    own_embedding: bool = False
    mapped: bool = True
    variant: Variant = PLAIN

    def __post_init__(self) -> None:
        checks = [
            *attention.uneven(self),
            (self.head_dim % 2, "head_dim must be even"),
            (self.draft_vocab_size > self.vocab_size, "draft_vocab_size must not exceed vocab_size"),
            (
                not self.mapped and self.draft_vocab_size != self.vocab_size,
                f"a draft_vocab_size other than vocab_size needs the tensor {OFFSETS}, which the checkpoint lacks",
            ),
            (
                not self.own_embedding and self.hidden_size != self.target_hidden_size,
                f"a hidden_size other than the model's needs the tensor {EMBEDDING}, which the checkpoint lacks",
            ),
        ]
        for broken, rule in checks:
            if broken:
                raise ConfigError(f"{rule}; the configuration is {self}")


def read_config(values: Mapping[str, Any], where: str, target: ModelConfig, parts: Collection[str]) -> Config:
    """Reads the fields of a head's config.json.

    Args:
        target: the configuration of the model that it drafts for.
        parts: which of EMBEDDING and OFFSETS the checkpoint has.

    Raises:
        ConfigError: naming the field, and where it does not fit the model both sides.
    """
    fields = Fields(values, where)
    fields.only_legal(_LEGAL)
    _refuse_unknown(fields, _READ | _WITHOUT_EFFECT)
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in _SIZES}
    hidden = fields.get(int, "target_hidden_size", default=read["hidden_size"], minimum=1)
    for name, ours, theirs in (("vocab_size", read["vocab_size"], target.vocab_size), ("target_hidden_size", hidden, target.hidden_size)):
        if ours != theirs:
            raise ConfigError(
                f"{where}: {name} is {ours}, and the model's {name.removeprefix('target_')} is {theirs}; legal is a head that was "
                "trained for the model"
            )
    if (layers := fields.get(int, "num_hidden_layers", default=1)) != 1:
        raise ConfigError(f"{where}: num_hidden_layers is {layers}; supported is 1")
    heads = read["num_attention_heads"]
    width = fields.get(int, "head_dim", default=read["hidden_size"] // heads, minimum=1)
    return Config(
        draft_vocab_size=fields.get(int, "draft_vocab_size", default=read["vocab_size"], minimum=1),
        target_hidden_size=hidden,
        num_key_value_heads=fields.get(int, "num_key_value_heads", default=heads, minimum=1),
        head_dim=width,
        rotary=read_rotary(fields, width, base=THETA),
        rms_norm_eps=fields.get(float, "rms_norm_eps", minimum=0),
        taps=_taps(fields, len(target.layer_kinds)),
        norm_before_residual=fields.get(bool, "norm_before_residual", default=False),
        own_embedding=EMBEDDING in parts,
        mapped=OFFSETS in parts,
        **read,
    )


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers whose incoming streams are read.

    Ids in `eagle_config`, as SpecForge and SGLang write and read them, are those of layers whose outputs are read; at the top level, as
    speculators and vLLM do, those of layers whose inputs are (`capture` of sgl-project/SpecForge a6b6b02, whose default is the one here;
    `aux_hidden_state_layers` in models of vllm-project/vllm 00bd149).
    """
    nested, name = fields.sub("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    _refuse_unknown(nested, {name, "use_aux_hidden_state"})
    nested.only("use_aux_hidden_state", True)
    source, shift = (nested, 1) if nested.has(name) else (fields, 0)
    if not source.has(name):
        if layers < 4:
            raise ConfigError(f"{fields.where}: {name} is missing, and the model has {layers} layers; legal without it are at least 4")
        return 2, layers // 2, layers - 3
    ids = source.values[name]
    if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int and 0 <= i + shift <= layers for i in ids):
        raise ConfigError(
            f"{source.where}: {name} is {ids!r}; the model has {layers} layers, expected a list of {-shift} to {layers - shift}"
        )
    return tuple(i + shift for i in ids)


def _refuse_unknown(fields: Fields, known: Collection[str]) -> None:
    """Refuses fields that may change the arithmetic, such as EAGLE-3.1's, unless they are absent or off."""
    # An absent norm_output is not an off one: SpecForge's default is on.
    off = {name for name, value in fields.values.items() if value is None or (value is False and name != "norm_output")}
    unknown = [name for name in fields.values if name not in known and name not in off]
    if unknown:
        raise ConfigError(f"{fields.where}: {unknown[0]} is {fields.values[unknown[0]]!r}; no such field of an EAGLE-3 head is supported")


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param.

    Keys: `fc` of the taps side by side; `hidden_norm`, `input_norm`, `mixer` (not joined, over embedding and hidden state side by side),
    `post_norm` and `mlp` of the layer; `norm` and `head`; `embed` and `model_ids` where the checkpoint has them.
    """
    M, V, taps = cfg.hidden_size, cfg.draft_vocab_size, len(cfg.taps) * cfg.target_hidden_size
    layer = PREFIX + "midlayer."
    tree: dict[str, Any] = {
        "fc": Param(Aval((M, taps), dtype), Source((PREFIX + "fc.weight",), ((M, taps),))),
        "hidden_norm": norm(layer + "hidden_norm", M, dtype, 0.0),
        "input_norm": norm(layer + "input_layernorm", M, dtype, 0.0),
        "mixer": attention.params(cfg, dtype, layer + "self_attn.", joined=False, width=2 * M, head_norms=attention.NONE),
        "post_norm": norm(layer + "post_attention_layernorm", M, dtype, 0.0),
        "mlp": feed_forward.dense_params(cfg, dtype, layer + "mlp."),
        "norm": norm(PREFIX + "norm", M, dtype, 0.0),
        "head": Param(Aval((V, M), dtype, ("vocab", None)), Source((PREFIX + "lm_head.weight",), ((V, M),))),
    }
    if cfg.own_embedding:
        shape = (cfg.vocab_size, M)
        tree["embed"] = Param(Aval(shape, dtype, ("vocab", None)), Source((PREFIX + EMBEDDING,), (shape,)), "embedding")
    return {**tree, "model_ids": _model_ids_param(V, cfg.vocab_size)} if cfg.mapped else tree


def _model_ids_param(count: int, vocab_size: int) -> Param:
    """The model's id of each of the head's: a checkpoint has the differences of both."""

    def join(offsets: torch.Tensor) -> torch.Tensor:
        ids = offsets.to(torch.int64) + torch.arange(count)
        if outside := [id for id in (int(ids.min()), int(ids.max())) if not 0 <= id < vocab_size]:
            raise CheckpointError(f"{OFFSETS} maps to the id {outside[0]}; the model's vocabulary has {vocab_size} tokens")
        return ids.to(torch.int32)

    def split(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((ids - torch.arange(count)).to(torch.int64),)

    source = Source((PREFIX + OFFSETS,), ((count,),), join, split, dtypes=(("I64", "I32"),))
    return Param(Aval((count,), torch.int32), source, "count")


def abstract_state(cfg: Config, limits: Limits, dtype: torch.dtype) -> Tree:
    """Tree of Aval: the key-value pools of the head's layer."""
    return attention.state(cfg, limits, dtype)


def features(cfg: Config, intermediates: Intermediates) -> torch.Tensor:
    """The streams that enter the layers of `taps`, side by side: [T, taps * target_hidden_size], laid out as the residual stream.

    Raises:
        ModelError: the model's family offers no streams.
    """
    if not intermediates.streams:
        raise ModelError("an EAGLE-3 head reads the residual streams of layers; legal are models of a family whose forward offers them")
    return torch.cat([intermediates.streams[tap] for tap in cfg.taps], -1)


def extend_cache(cfg: Config, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
    """Writes the head's keys and values, from features of token i, or the head's own hidden state of it, and the id of token i+1.

    Arguments are those of `family.ExtendDraftCache`; rows are the layer's residual `stream` [T, M] and its input `normed` [T, 2 M].
    """
    head, batch = params[DRAFT], Batch.of(_placed(cfg, inputs), cfg.rotary)
    stream = ops.linear(hidden, head["fc"]) if first else hidden
    table = head["embed"] if cfg.own_embedding else params["embed"]
    token = ops.rms_norm(sequence_parallel.embed_with_pictures(batch.tokens, table, inputs), head["input_norm"], cfg.rms_norm_eps, 0.0)
    normed = ops.rms_norm(stream, head["hidden_norm"], cfg.rms_norm_eps, 0.0)
    # One gather of all that the layer reads: two would not wait for each other, nor one of the stream for the embedding.
    read = [token, normed] if cfg.norm_before_residual else [token, normed, stream]
    gathered = sequence_parallel.whole(torch.cat(read, -1), batch.size * batch.q_len)
    # Rows of their own, so that a draft from these is the same body as one from the rows of another pass.
    x, stream = gathered[:, : 2 * cfg.hidden_size].contiguous(), gathered[:, -cfg.hidden_size :].contiguous()
    pool = attention.write_kv(cfg, head["mixer"], state[DRAFT], batch, x)
    return {"stream": stream, "normed": x}, {**state, DRAFT: pool}


def _placed(cfg: Config, inputs: Tree) -> Tree:
    """Inputs whose tokens have one position: a head without sections turns by the time alone, as vLLM 00bd149 has it.

    Raises:
        ModelError: rows of pictures, which are as wide as the model, stand among narrower ones.
    """
    if "positions" not in inputs:
        return inputs
    if cfg.hidden_size != cfg.target_hidden_size:
        raise ModelError(
            f"rows of pictures have {cfg.target_hidden_size} channels, and the draft head's embedding {cfg.hidden_size}; legal is a head "
            "as wide as its model, or a build with --language-model-only"
        )
    return inputs if cfg.rotary.sections else {**inputs, "positions": inputs["positions"][..., 0]}


def draft(cfg: Config, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor:
    """Runs the head's layer over tokens that are in its cache; results and arguments are those of `DraftHead.draft`.

    The hidden states are those before the final norm, which the next pass reads.
    """
    head, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    mixed = attention.attend(cfg, head["mixer"], state[DRAFT], batch, rows["normed"])
    residual = sequence_parallel.spread(rows["stream"])
    x, stream = ops.add_rms_norm(mixed, residual, head["post_norm"], cfg.rms_norm_eps, 0.0)
    out: torch.Tensor = stream + feed_forward.dense(head["mlp"], x, batch.size * batch.q_len)
    return out


def logits(cfg: Config, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of hidden states [B, M] over the head's vocabulary, split over it where the layout splits it."""
    normed = ops.rms_norm(hidden, params[DRAFT]["norm"], cfg.rms_norm_eps, 0.0)
    scores: torch.Tensor = ops.linear(normed, params[DRAFT]["head"])
    return scores


def model_ids(cfg: Config, params: Tree, ids: torch.Tensor) -> torch.Tensor:
    """The model's ids of the head's: [B] i32 each."""
    return params[DRAFT]["model_ids"].index_select(0, ids) if cfg.mapped else ids


def vocab_size(cfg: Config) -> int:
    """Ids of the head's vocabulary."""
    return cfg.draft_vocab_size


def shrink(cfg: Config, target: ModelConfig, tp: int) -> Config:
    """A small configuration for `DraftFamily.shrink`."""
    layers, count, same = len(target.layer_kinds), len(cfg.taps), cfg.draft_vocab_size == cfg.vocab_size
    return replace(
        cfg,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if same else target.vocab_size // (2 * tp) * tp,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size if cfg.hidden_size == cfg.target_hidden_size else sizes.HIDDEN // 2,
        intermediate_size=sizes.ffn(tp),
        **sizes.heads(cfg, tp),
        taps=tuple(layers * (i + 1) // (count + 1) for i in range(count)),
    )


def canonical(name: str) -> str:
    """Names of vLLM's checkpoints as those of EAGLE's."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


DRAFT_FAMILY = DraftFamily(
    name="eagle3",
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    read_config=read_config,
    abstract_params=abstract_params,
    abstract_state=abstract_state,
    features=features,
    head=DraftHead(DRAFT, extend_cache, draft, logits, model_ids, vocab_size),
    shrink=shrink,
    optional=(EMBEDDING, OFFSETS),
    not_read={"t2d": f"which of the model's tokens are among the head's, which {OFFSETS} says too"},
    canonical=canonical,
)
