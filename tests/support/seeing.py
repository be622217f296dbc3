"""A random checkpoint that reads pictures as published ones do, with the tokenizer and the template of `shown`, and what transformers makes
of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support import oracle, towers
from support.shown import ID_FIELDS, IDS, IMAGE_ID, SMALL, TEMPLATE, VISION, codec
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from npucompile.server.pictures.decoding import decode
from npucompile.server.pictures.processor import Picture


@functools.cache
def model() -> Any:
    """A wrapped model of transformers whose every parameter is drawn."""
    text = {**towers.TEXT, "vocab_size": 264}
    vision = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **towers.TOWERS["width 72"]}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "out_hidden_size": text["hidden_size"]}, **IDS)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    oracle.draw(theirs, 36)
    with torch.no_grad():
        # Sampled, they would be taken for pictures by transformers.
        theirs.lm_head.weight[[IDS[name] for name in ID_FIELDS]] = 0
    return theirs


def saved(directory: Path, *, template: bool = True) -> Path:
    """Its checkpoint."""
    model().save_pretrained(directory)
    codec().library.save(str(directory / "tokenizer.json"))
    (directory / "preprocessor_config.json").write_text(json.dumps(SMALL))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE} if template else {}))
    return directory


def prepared(data: bytes) -> Picture:
    """A picture as the checkpoint's processor makes it."""
    return VISION.processor.picture(decode(data))


@torch.no_grad()
def greedy(tokens: Sequence[int], pictures: Sequence[Picture], count: int) -> list[int]:
    """Tokens that transformers generates behind a prompt."""
    theirs, ids = model(), torch.tensor([list(tokens)])
    theirs.model.rope_deltas = None
    shown = {
        "pixel_values": torch.cat([VISION.processor.normalised(picture.pixels) for picture in pictures]),
        "image_grid_thw": torch.tensor([list(picture.grid) for picture in pictures]),
    } if pictures else {}  # fmt: skip
    made = theirs.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == IMAGE_ID).long(), **shown,
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return list(made[0, len(tokens) :].tolist())
