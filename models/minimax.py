"""MiniMax-M2 to M2.7: Qwen3's layers, normed over all heads at once and rotated in part, and a router of sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..graphs.errors import ConfigError
from . import attention, qwen3
from . import shrink as sizes
from .config import Fields
from .config_fields import refuse_unknown
from .rotary import rotary_fields
from .routing import SIGMOID

NAME = "minimax"
FULL = 1
"""Kind of a layer in `attn_type_list`; the others are linear attention, of the generation before."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "max_position_embeddings",
)

# Fields of config.json of which only these values are implemented.
_LEGAL: dict[str, tuple[bool | str | int | float, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "routed_scaling_factor": (1, 1.0),
    "layernorm_full_attention_beta": (1, 1.0),
    "layernorm_mlp_beta": (1, 1.0),
}

# No published checkpoint has tensors of the draft modules that its file declares; nor has one layers without experts or with windows.
_UNREAD = frozenset({
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode"),
    *("layernorm_linear_attention_beta", "use_grouped_topk", "swa_rope_theta"),
})  # fmt: skip


def read_config(values: Mapping[str, Any], where: str = "config.json") -> qwen3.Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    fields.only_legal(_LEGAL)
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in _SIZES}
    layers, kinds = fields.num_layers(), values.get("attn_type_list")
    if kinds is not None and kinds != [FULL] * layers:
        raise ConfigError(f"{where}: attn_type_list is {kinds!r}; supported is {layers} times {FULL}")
    width = read["head_dim"]
    read |= rotary_fields(fields, width, read, partial=fields.get(int, "rotary_dim", default=width, minimum=2) / width, base=5e6)
    config = qwen3.Config(
        layer_kinds=(qwen3.MOE,) * layers,
        rms_norm_eps=fields.get(float, "rms_norm_eps", minimum=0),
        tie_word_embeddings=fields.get(bool, "tie_word_embeddings", default=False),
        num_experts=fields.get(int, "num_local_experts", "num_experts", minimum=1),
        moe_intermediate_size=fields.get(int, "intermediate_size", minimum=1),
        head_norms=attention.ALL,
        routing_kind=SIGMOID,
        **read,
    )
    refuse_unknown(fields, fields, _UNREAD | {"attn_type_list"})
    return config


FAMILY = replace(qwen3.FAMILY, name=NAME, model_types=("minimax_m2",), read_config=read_config, widths={**sizes.WIDTHS, "rotary_dim": 16})
