"""The GLM-5 and GLM-5.1 models: those of DeepSeek V3.2 with other sizes, whose indexer rotates channels in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import deepseek_v3, deepseek_v32
from .config import Fields

NAME = "glm_moe_dsa"


@dataclass(frozen=True)
class Config(deepseek_v32.Config):
    """Sizes of a GLM-5 model; field names follow its config.json."""

    indexer_rope_interleave: bool = True


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    fields = Fields(values, where)
    # Routers have logits in float32 here, whatever a file says.
    fields.only("moe_router_dtype", "float32")
    # Files that leave the field out are of models that were trained with pairs all the same.
    interleave = fields.get(bool, "indexer_rope_interleave", default=True)
    # Every layer chooses keys of its own.
    fields.only("index_topk_freq", 1)
    fields.kinds("indexer_types", "full")
    sizes = deepseek_v32.index_sizes(fields)
    return Config(indexer_rope_interleave=interleave, **sizes, **deepseek_v3.config_fields(fields))


FAMILY = replace(deepseek_v32.FAMILY, name=NAME, model_types=(NAME,), read_config=read_config)
