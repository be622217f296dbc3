"""Random checkpoints with vision towers, made by transformers, and pictures for them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from support import oracle
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
TEXT = oracle.settings("lllf", 0.5, rope_parameters={
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
})  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "width 72": {"hidden_size": 144, "num_heads": 2, "intermediate_size": 100, "depth": 2, "num_position_embeddings": 49},
    "width 64": {"hidden_size": 192, "num_heads": 3, "intermediate_size": 77, "depth": 3, "num_position_embeddings": 16},
    "small patches": {"hidden_size": 40, "num_heads": 5, "intermediate_size": 64, "depth": 1, "num_position_embeddings": 36}
    | {"patch_size": 4},
}


@functools.cache
def model(name: str) -> Any:
    """A wrapped model of transformers whose every parameter is drawn: its own start hides wrong biases."""
    settings = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **TOWERS[name]}
    config = Qwen3_5Config(text_config=TEXT, vision_config={**settings, "out_hidden_size": TEXT["hidden_size"]}, **IDS)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    oracle.draw(theirs, 36)
    return theirs


def saved(name: str, directory: Path) -> Path:
    """A checkpoint of a model, with published names."""
    model(name).save_pretrained(directory)
    return directory


def patches(name: str, grids: list[tuple[int, int, int]], seed: int) -> torch.Tensor:
    """Random normalised patches of pictures and videos, one behind the other: [all patches, patch_dim] f32."""
    vision = model(name).config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    count = sum(t * h * w for t, h, w in grids)
    return torch.rand(count, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@torch.no_grad()
def rows(name: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """What transformers' tower makes of them: [all patches / 4, M] f32."""
    made: torch.Tensor = model(name).model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output
    return made
