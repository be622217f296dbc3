"""The text of Kimi-K2 models: DeepSeek V3 with other sizes; from 2.5 on a file wraps it, beside a vision tower that is not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import deepseek_v3
from .config import Fields

NAME = "kimi_k2"


def read_config(values: Mapping[str, Any], where: str = "config.json") -> deepseek_v3.Config:
    """Reads the fields of a Hugging Face config.json, bare text model or wrapped in `text_config`.

    The wrapper's `tie_word_embeddings` is of no text model: published files leave the default, and their heads are tensors of their own.

    Raises:
        ConfigError: naming the field.
    """
    outer = Fields(values, where)
    text = outer.sub("text_config") if outer.has("text_config") else outer
    text.only("model_type", NAME, *deepseek_v3.FAMILY.model_types)
    return deepseek_v3.Config(**deepseek_v3.config_fields(text, outer))


FAMILY = replace(deepseek_v3.FAMILY, name=NAME, model_types=(NAME, "kimi_k25"), read_config=read_config)
