"""Float checkpoints of small models with and without experts, and the leaves that their quantised parameters have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import tiny

from npucompile.graphs import tree
from npucompile.models import checkpoint, registry
from npucompile.models.quant.formats import Formats
from npucompile.tools.progress import Progress
from npucompile.tools.quantize.driver import QuantizeSettings, quantize
from npucompile.tools.quantize.forward import in_formats

DENSE: dict[str, Any] = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_experts": 0, "intermediate_size": 48}
PLAIN: dict[str, Any] = {
    **DENSE, **tiny.NO_RECURRENT, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"moe": {}, "dense": DENSE, "plain": PLAIN, "tied": {**DENSE, "tie_word_embeddings": True}}
"""Changes to `tiny.CONFIG`."""


def write(directory: Path, kind: str) -> registry.ModelSource:
    """A random float checkpoint of one of MODELS."""
    return registry.find(tiny.write_checkpoint(directory, **MODELS[kind]))


def quantised(source: registry.ModelSource, out: Path, scheme: str, **settings: Any) -> registry.ModelSource:
    """The checkpoint that `npucompile quantize` writes of it."""
    quantize(source, out, QuantizeSettings(scheme, **settings), Progress(quiet=True))
    return registry.find(out)


def leaves(
    source: registry.ModelSource, formats: Formats, *, drafting: bool = True, ranks: int = 1, dtype: torch.dtype = torch.float32
) -> Mapping[str, torch.Tensor]:
    """All tensors of a model's parameters by path, for one device that stands for that many ranks of a group."""
    model = in_formats(source.model, formats)
    shards = tuple((axis, ranks) for axis in ("q_heads", "delta_heads", "ffn", "shared_ffn", "expert_ffn") if ranks > 1)
    model = replace(model, drafting=drafting, config=replace(model.config, variant=replace(model.config.variant, shards=shards)))
    assert source.checkpoint_dir
    tensors = checkpoint.load(checkpoint.open_checkpoint(source.checkpoint_dir), model.params(dtype))
    return dict(tree.flatten(tensors))
