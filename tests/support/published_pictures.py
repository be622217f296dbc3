"""Pictures, and what transformers' own processor, the one that published checkpoints name, makes of them.

That processor needs torchvision, whose wheels do not load beside every torch: its results are kept in tests/golden/pictures.json. Where
torchvision 0.28 is, `python tests/support/published_pictures.py` writes them again.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

FIELDS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The preprocessor_config.json of Qwen3.5 and 3.6."""

GOLDEN = Path(__file__).parents[1] / "golden" / "pictures.json"
"""Digests of `cases`, a line for each share of them."""
SHARE = 25
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
_COEFFICIENTS = ((3, 5, 1, 4), (2, 7, 3, 6), (11, 1, 5, 3), (1, 2, 9, 5), (7, 3, 2, 2))


def picture(height: int, width: int, seed: int, mode: str = "RGB") -> Image.Image:
    """A picture of slopes, rings and edges, by integers alone, so that it is the same everywhere."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.int64)
    channels = [(rows * rows * a + columns * columns * b + rows * columns * c) >> d for a, b, c, d in _COEFFICIENTS[seed % 2 :][:4]]
    values = (np.stack(channels, -1) * (2 * seed + 1) & 255).astype(np.uint8)
    if mode == "1":
        return Image.fromarray(values[:, :, 0] > 99)
    kept = {"RGB": values[:, :, :3], "L": values[:, :, 0], "P": values[:, :, 0], "LA": values[:, :, ::3]}.get(mode, values)
    image = Image.frombytes(mode, (width, height), np.ascontiguousarray(kept).tobytes())
    if mode == "P":
        image.putpalette([(i * step) & 255 for i in range(256) for step in (7, 31, 101)])
    return image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def digest(values: torch.Tensor, grid: list[int]) -> str:
    """The first 16 digits of the SHA-256 of patches [N, D] f32 and of their grid."""
    return hashlib.sha256(json.dumps(grid).encode() + values.contiguous().numpy().tobytes()).hexdigest()[:16]


def cases() -> list[tuple[int, int, int, str]]:
    """500 sizes and modes, of small pictures, long ones and some of a screen."""
    draw = random.Random(36)
    sizes = [(448, 448), (1024, 1024), (1, 1), (80, 80), (144, 144), (31, 33), (1, 200), (10, 1999), (30, 150), (150, 30), (721, 1283)]
    sizes += [(draw.randint(1, 600), draw.randint(1, 600)) for _ in range(441)]
    sizes += [(draw.randint(1, 30), draw.randint(1, 30) * 20) for _ in range(24)]
    sizes += [(draw.randint(600, 1400), draw.randint(600, 1400)) for _ in range(25)]
    legal = [(height, width) for height, width in sizes if max(height, width) <= 200 * min(height, width)]
    modes = MODES[:-1]  # CMYK comes in JPEGs alone, whose pixels are the library's own
    return [(*size, draw.randint(0, 99), modes[i % len(modes)]) for i, size in enumerate(legal)]


def declare_torchvision() -> None:
    """Declares operators of torchvision's library, which its Python needs; that of a wheel for CUDA loads beside no torch for CPUs."""
    sys.modules["torch_npu"] = None  # type: ignore[assignment]
    for name in ("nms", "qnms"):
        _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _published() -> Any:
    declare_torchvision()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(**{name: value for name, value in FIELDS.items() if not name.endswith(("_type", "_class"))})


def _write() -> None:
    processor, digests = _published(), []
    for case in cases():
        made = processor(images=[picture(*case)], return_tensors="pt")
        digests.append(digest(made["pixel_values"], made["image_grid_thw"][0].tolist()))
    lines = [json.dumps(digests[first : first + SHARE]) for first in range(0, len(digests), SHARE)]
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
