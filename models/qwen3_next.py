"""The Qwen3-Next models: hybrid decoders (hybrid.py) whose checkpoints hold the projections of DeltaNet by key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import decoder, hybrid
from .config import Fields
from .family import Family

NAME = "qwen3_next"

# Fields of config.json of which only these values are implemented.
_LEGAL: dict[str, tuple[bool | str, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_qk_norm": (True,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}

DRAFT_HEAD = replace(hybrid.DRAFT_HEAD, declared_by=("num_nextn_predict_layers",))


def read_config(values: Mapping[str, Any], where: str = "config.json") -> hybrid.Config:
    """Reads the fields of a Hugging Face config.json.

    Published files do not mention the multi-token-prediction layer that their checkpoints hold (`mtp.*`): without the field there is one,
    as in vLLM and SGLang.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    for name, legal in _LEGAL.items():
        fields.only(name, *legal)
    return hybrid.read_config(
        fields,
        fields,
        norm_topk_prob=fields.get(bool, "norm_topk_prob"),
        dense_layers=fields.dense_layers(),
        mtp_num_hidden_layers=fields.get(int, DRAFT_HEAD.declared_by[0], default=1, minimum=0),
        fused_projections=True,
    )


FAMILY = Family(
    name=NAME,
    model_types=("qwen3_next",),
    read_config=read_config,
    abstract_params=hybrid.abstract_params,
    abstract_state=hybrid.abstract_state,
    forward=hybrid.forward,
    head=decoder.head,
    shrink=hybrid.shrink,
    widths=hybrid.WIDTHS,
    draft_head=DRAFT_HEAD,
)
