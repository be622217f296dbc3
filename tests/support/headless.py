"""Checkpoints as transformers saves them: their configuration declares a draft head, and no tensor is one of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import oracle


def _wrapped(values: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_5", "text_config": {**values, "mtp_num_hidden_layers": 1}}


MODELS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "qwen3_5": ("moe", lambda values: {**values, "mtp_num_hidden_layers": 1}),
    "qwen3_5, wrapped": ("dense", _wrapped),
    # Published files of Qwen3-Next declare their head by leaving the field out.
    "qwen3_next": ("next", lambda values: values),
    "deepseek_v3": ("latent", lambda values: {**values, "num_nextn_predict_layers": 1}),
    "deepseek_v3, as transformers calls it": (
        "latent-yarn",
        lambda values: {name: value for name, value in values.items() if "nextn" not in name} | {"num_mtp_layers": 1},
    ),
    "deepseek_v32": ("sparse", lambda values: {**values, "num_nextn_predict_layers": 1}),
    "glm4_moe": ("biased", lambda values: {**values, "num_nextn_predict_layers": 1}),
    "glm4_moe_lite": ("lite", lambda values: {**values, "num_nextn_predict_layers": 1}),
    "glm_moe_dsa": ("shared-index", lambda values: {**values, "num_nextn_predict_layers": 1}),
}
"""Case of oracle.py, and the configuration that declares a head."""


def write(directory: Path, name: str) -> Path:
    """Writes one of MODELS."""
    case, declared = MODELS[name]
    oracle.case(case).theirs.save_pretrained(directory)
    config = directory / "config.json"
    config.write_text(json.dumps(declared(json.loads(config.read_text()))))
    return directory
