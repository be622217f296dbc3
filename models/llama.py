"""The models of Llama's kind: Llama 2 and 3, Mistral, Mixtral, Qwen2 and Qwen2.5. Their layers are Qwen3's, without norms of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..graphs.errors import ConfigError
from . import attention, qwen3
from .config import Fields
from .config_fields import refuse_unknown
from .rotary import rotary_fields

LLAMA, MISTRAL, MIXTRAL, QWEN2 = "llama", "mistral", "mixtral", "qwen2"

_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")

# Fields of config.json of which only these values are implemented.
_LEGAL: dict[str, tuple[bool | str, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
}

_THETA = {LLAMA: 1e4, MIXTRAL: 1e6}
"""Base of the rotation where a file does not say it, as in transformers 5.23."""

_WINDOWS = {MISTRAL: 4096}
"""Window where a file has no `sliding_window`, as in transformers 5.23; the other kinds have none then."""


def read_config(values: Mapping[str, Any], where: str = "config.json") -> qwen3.Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    fields.only_legal(_LEGAL)
    fields.kinds("layer_types", "full_attention")
    kind = fields.get(str, "model_type")
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in _SIZES}
    heads = read["num_attention_heads"]
    width = fields.get(int, "head_dim", default=read["hidden_size"] // heads, minimum=1)
    read |= rotary_fields(fields, width, read, base=_THETA.get(kind))
    if kind != QWEN2:
        _refuse_window(values, where, kind, read["max_position_embeddings"])
    experts = fields.get(int, "num_local_experts", "num_experts", minimum=1) if kind == MIXTRAL else 0
    if experts:
        read |= {"moe_intermediate_size": read.pop("intermediate_size")}
        read |= {"num_experts": experts, "num_experts_per_tok": fields.get(int, "num_experts_per_tok", minimum=1)}
    config = qwen3.Config(
        num_key_value_heads=fields.get(int, "num_key_value_heads", default=heads, minimum=1),
        head_dim=width,
        layer_kinds=(qwen3.MOE if experts else qwen3.DENSE,) * fields.num_layers(),
        rms_norm_eps=fields.get(float, "rms_norm_eps", minimum=0),
        tie_word_embeddings=fields.get(bool, "tie_word_embeddings", default=False),
        head_norms=attention.NONE,
        biased=kind == QWEN2,
        **read,
    )
    refuse_unknown(fields, fields, frozenset({"sliding_window", "max_window_layers"}))
    return config


def _refuse_window(values: Mapping[str, Any], where: str, kind: str, longest: int) -> None:
    """A window of the whole context is none."""
    window = values.get("sliding_window", _WINDOWS.get(kind))
    if window is not None and (type(window) is not int or window < longest):
        absent = "" if "sliding_window" in values else ", which the file leaves out"
        raise ConfigError(f"{where}: sliding_window is {window!r}{absent}; supported is null, or at least the context of {longest}")


FAMILY = replace(qwen3.FAMILY, name=LLAMA, model_types=(LLAMA, MISTRAL, MIXTRAL, QWEN2), read_config=read_config)
