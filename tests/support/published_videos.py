"""Videos, and what transformers' own processor, the one that published checkpoints name, makes of them.

As for pictures (`published_pictures.py`) its results are kept, in tests/golden/videos.json. Where torchvision 0.28 is,
`python tests/support/published_videos.py` writes them again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.published_pictures import FIELDS as PICTURE_FIELDS
from support.published_pictures import declare_torchvision, digest, picture

FIELDS: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    **{name: PICTURE_FIELDS[name] for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")},
}
"""The video_preprocessor_config.json of Qwen3.5 and 3.6."""

CAPPED = {"cap_pixels_per_frame": True, "max_video_tokens": 12, "max_frames": 16, "fps": 5}
"""Fields of a file that bounds each frame."""

GOLDEN = Path(__file__).parents[1] / "golden" / "videos.json"


def frames(indices: Iterable[int], height: int, width: int, seed: int) -> Iterable[torch.Tensor]:
    """Frames [3, height, width] u8 of a video, all different."""
    first = torch.from_numpy(np.array(picture(height, width, seed))).permute(2, 0, 1)
    return (first + torch.tensor(index * 37 % 256, dtype=torch.uint8) for index in indices)


def _cases() -> list[tuple[int, float | None, int, int, int, bool]]:
    """Frames, frames a second, height, width, seed, and whether each frame is bounded: 200, the first of which are known vectors."""
    draw = random.Random(36)
    cases: list[tuple[int, float | None, int, int, int, bool]] = [
        (50, 25.0, 96, 128, 0, False),
        (7, 2.0, 64, 64, 1, False),
        (3, 30.0, 64, 64, 2, False),
        (2, None, 31, 33, 3, False),
        (900, 30.0, 40, 60, 4, False),
        (1600, 1.0, 16, 16, 5, False),
        (48, 12.0, 720, 1280, 6, True),
    ]
    rates = (1.0, 10.0, 12.5, 15.0, 24.0, 24000 / 1001, 25.0, 30000 / 1001, 30.0, 50.0, 60.0, None)
    while len(cases) < 200:
        size = (draw.randint(1, 260), draw.randint(1, 260)) if draw.random() < 0.8 else (draw.randint(1, 24), draw.randint(100, 600))
        if max(size) <= 150 * min(size):
            cases.append((draw.randint(2, 160), draw.choice(rates), *size, draw.randint(0, 99), draw.random() < 0.25))
    return cases


def _write() -> None:
    declare_torchvision()
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    kept = {name: value for name, value in FIELDS.items() if not name.endswith(("_type", "_class"))}
    lines = []
    for case in _cases():
        count, rate, height, width, seed, capped = case
        processor = Qwen3VLVideoProcessor(**kept, **(CAPPED if capped else {"cap_pixels_per_frame": False}))
        video = torch.stack(list(frames(range(count), height, width, seed)))
        made = processor(
            [video], video_metadata=[VideoMetadata(total_num_frames=count, fps=rate)], return_metadata=True, return_tensors="pt"
        )
        caller = SimpleNamespace(video_processor=processor, video_token=".", vision_start_token="[", vision_end_token="]")
        caller._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, caller)
        text = Qwen3VLProcessor.replace_video_token(caller, made, 0)
        texts = [each.rpartition("[")[0] for each in text.split("]")[:-1]]
        assert {len(each) for each in text.replace("[", "]").split("]")[1::2]} == {int(made["video_grid_thw"][0, 1:].prod()) // 4}
        grid = made["video_grid_thw"][0].tolist()
        indices = [int(index) for index in made["video_metadata"][0].frames_indices]
        lines.append(json.dumps([case, indices, texts, grid, digest(made["pixel_values_videos"], grid)]))
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
