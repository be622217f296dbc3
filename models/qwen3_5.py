"""The Qwen3.5 models, dense and MoE: hybrid decoders (hybrid.py) with a configuration that may be wrapped, with a tower (vision.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import decoder, hybrid, vision
from .config import Fields
from .family import Family

NAME = "qwen3_5"

# Fields of config.json of which only these values are implemented.
_LEGAL = {
    **hybrid.LEGAL,
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
}

DRAFT_HEAD = replace(hybrid.DRAFT_HEAD, declared_by=("mtp_num_hidden_layers",))


def read_config(values: Mapping[str, Any], where: str = "config.json") -> hybrid.Config:
    """Reads the fields of a Hugging Face config.json, bare text model or wrapped in `text_config`.

    Every model of the family makes the weights of a token's experts sum to 1.

    Raises:
        ConfigError: naming the field.
    """
    outer = Fields(values, where)
    text = outer.sub("text_config") if outer.has("text_config") else outer
    text.only_legal(_LEGAL)
    return hybrid.read_config(outer, text, mtp_num_hidden_layers=text.get(int, DRAFT_HEAD.declared_by[0], default=0, minimum=0))


FAMILY = Family(
    name=NAME,
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    read_config=read_config,
    abstract_params=hybrid.abstract_params,
    abstract_state=hybrid.abstract_state,
    forward=hybrid.forward,
    head=decoder.head,
    shrink=hybrid.shrink,
    widths=hybrid.WIDTHS,
    draft_head=DRAFT_HEAD,
    tower=vision.TOWER,
)
