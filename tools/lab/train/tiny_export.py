"""Writes trained parameters as a Hugging Face checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ....graphs import tree
from ....graphs.types import Tree
from ....models import hybrid
from .tiny_tokenizer import save_tokenizer


def checkpoint_tensors(cfg: hybrid.Config, params: Tree) -> dict[str, torch.Tensor]:
    """bf16 tensors by their Hugging Face names, experts fused as in the public checkpoints."""
    tensors: dict[str, torch.Tensor] = {}
    for (_, declared), (_, value) in zip(tree.flatten(hybrid.abstract_params(cfg, torch.bfloat16)), tree.flatten(params), strict=True):
        for name, part in zip(declared.source.names, declared.source.split(value.detach()), strict=True):
            tensors[name] = part.to(torch.bfloat16).contiguous()
    return tensors


def export(cfg: hybrid.Config, config: dict[str, Any], params: Tree, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's two files."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    for name, values in (("config.json", config), ("generation_config.json", {**ends, "do_sample": False})):
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, config["max_position_embeddings"])
    part = directory / "model.safetensors.part"
    save_file(checkpoint_tensors(cfg, params), part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(directory / "model.safetensors")
