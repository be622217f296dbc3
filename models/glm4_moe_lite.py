"""The GLM-4.7-Flash model: DeepSeek V3 with other sizes, whose first layer has no experts where a file does not say which have some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import deepseek_v3
from .config import Fields

NAME = "glm4_moe_lite"


def read_config(values: Mapping[str, Any], where: str = "config.json") -> deepseek_v3.Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    return deepseek_v3.Config(**deepseek_v3.config_fields(Fields({"first_k_dense_replace": 1, **values}, where)))


FAMILY = replace(deepseek_v3.FAMILY, name=NAME, model_types=(NAME,), read_config=read_config)
