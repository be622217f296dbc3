"""Writes a checkpoint of random weights with the layers of another model at a small width, to rehearse a deployment with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import SpecError
from ...models import checkpoint, registry
from ...models.config_fields import STORAGE
from ...models.family_file import FamilyFile
from ...models.params import initialise
from ...models.presets import BUNDLED
from ...models.tied_head import TIED

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def reduced_config(values: Mapping[str, Any], widths: Mapping[str, int], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json with the same layers, heads and draft head at a small width.

    Args:
        values: of the large model.
        widths: `Family.widths` of its family.
        tokenizer: the config.json of the model whose tokenizer is used.
    """
    text = {"model_type": values.get("model_type"), **(values.get("text_config") or values)}
    text |= {TIED: values[TIED]} if values.get(TIED) is not None else {}
    # Weights are drawn as floats, whatever those of the large model are stored as.
    text = {name: value for name, value in text.items() if name not in STORAGE}
    if not text.get("head_dim") and text.get("hidden_size") and text.get("num_attention_heads"):
        # Without it heads are shares of the width, which shrinks.
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text |= {name: min(int(text[name]), width) for name, width in widths.items() if text.get(name)}
    text |= {name: tokenizer[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    rope = {name: value for name, value in (text.get("rope_parameters") or {}).items() if not name.startswith("mrope")}
    return {**text, "rope_parameters": rope, "dtype": "bfloat16"} if rope else {**text, "dtype": "bfloat16"}


def write_reduced(model: str, directory: Path, seed: int = 0, family: FamilyFile | None = None) -> Path:
    """Writes the checkpoint, with the bundled model's tokenizer; equal seeds give equal bytes.

    Args:
        model: preset name or checkpoint directory of the large model.
        directory: new or empty.
        family: the file of its family, where that is the user's own.

    Raises:
        SpecError: the directory holds something.
        ModelError: the model is not known or not supported.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SpecError(f"{directory} exists; legal is a new or empty directory")
    source, bundled = registry.find(model, family), registry.find(BUNDLED[0])
    assert bundled.checkpoint_dir is not None
    config = reduced_config(json.loads(source.text), source.model.family.widths, json.loads(bundled.text))
    small = registry.from_config(f"{source.name}-reduced", config, family=family)
    params = replace(small, drafting=small.has_draft_head).params(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled.checkpoint_dir / name, directory / name)
    # Others may build from it; the file library lets only its owner read what it writes.
    checkpoint.save(params, initialise(params, torch.Generator().manual_seed(seed)), directory).chmod(0o644)
    return directory
