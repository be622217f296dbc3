"""The Qwen3-Next models: hybrid decoders (hybrid.py) whose checkpoints hold the projections of DeltaNet by key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import hybrid, qwen3_5
from .config import Fields

NAME = "qwen3_next"

DRAFT_HEAD = replace(hybrid.DRAFT_HEAD, declared_by=("num_nextn_predict_layers",))


def read_config(values: Mapping[str, Any], where: str = "config.json") -> hybrid.Config:
    """Reads the fields of a Hugging Face config.json.

    Published files do not mention the multi-token-prediction layer that their checkpoints hold (`mtp.*`): without the field there is one,
    as in vLLM and SGLang.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    fields.only_legal(hybrid.LEGAL)
    return hybrid.read_config(
        fields,
        fields,
        norm_topk_prob=fields.get(bool, "norm_topk_prob"),
        dense_layers=fields.dense_layers(),
        mtp_num_hidden_layers=fields.get(int, DRAFT_HEAD.declared_by[0], default=1, minimum=0),
        fused_projections=True,
    )


FAMILY = replace(qwen3_5.FAMILY, name=NAME, model_types=(NAME,), read_config=read_config, draft_head=DRAFT_HEAD, tower=None)
