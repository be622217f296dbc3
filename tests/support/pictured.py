"""A random checkpoint with a vision tower and a tokenizer, built and served, for clients that send pictures; transformers is its oracle."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from support import oracle, tiny, towers
from support.shown import IMAGE_ID, SMALL, SMALL_VIDEOS, TEMPLATE, VIDEO_ID, codec
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.pictures.processor import Picture, processor_of
from npucompile.server.pictures.videos import Video
from npucompile.server.run import serving
from npucompile.tools.notation import EncodeSize
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.serving import RunningService, start_service

IDS = {"vision_start_token_id": 256, "vision_end_token_id": 257, "image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
CONTEXT = 448
PROCESSOR = processor_of(SMALL, "preprocessor_config.json")


@functools.cache
def model() -> Any:
    """Of transformers, every parameter drawn."""
    vision = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **towers.TOWERS["width 72"]}
    text = {**towers.TEXT, "vocab_size": 260}
    theirs = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config={**vision, "out_hidden_size": text["hidden_size"]}, **IDS)
    ).eval()
    oracle.draw(theirs, 36)
    with torch.no_grad():
        theirs.lm_head.weight[list(IDS.values())] = 0
    return theirs


def checkpoint(directory: Path) -> Path:
    """With the files that published ones have."""
    model().save_pretrained(directory)
    (directory / "tokenizer.json").write_text(codec().library.to_str())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(SMALL))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(SMALL_VIDEOS))
    return directory


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[str, RunningService]]:
    """A server of that checkpoint, on the CPU's reference backend: its URL without a path, and its engine and service."""
    sizes = {"buckets": (1, 4), "prefill": (32, 128), "encode": (EncodeSize(64, 2), EncodeSize(256)), "max_model_len": CONTEXT}
    tiny.built(tiny.planned(checkpoint(directory / "checkpoint"), **sizes), directory / "out")
    artifact = Artifact.open(directory / "out")
    running = start_service(artifact, lambda: CpuExecutor(artifact), api=ApiSettings(names=("tiny",)))
    with contextlib.ExitStack() as stack:
        stack.callback(running.engine.stop, drain=False)
        stack.callback(running.closing.close)
        yield stack.enter_context(serving(running.service)).replace("ws://", "http://").removesuffix("/v1/responses"), running


@torch.no_grad()
def continued(prompt: Sequence[int], shown: Sequence[Picture | Video], count: int) -> list[int]:
    """Greedy tokens of transformers behind a prompt."""
    tokens, theirs = list(prompt), model()
    pictures = [each for each in shown if isinstance(each, Picture)]
    videos = [[pair.picture for pair in each.pairs] for each in shown if isinstance(each, Video)]
    given: dict[str, torch.Tensor] = {}
    if pictures:
        given["pixel_values"] = torch.cat([PROCESSOR.normalised(each.pixels) for each in pictures])
        given["image_grid_thw"] = torch.tensor([each.grid for each in pictures])
    if videos:
        given["pixel_values_videos"] = torch.cat([PROCESSOR.normalised(each.pixels) for pairs in videos for each in pairs])
        given["video_grid_thw"] = torch.tensor([(len(pairs), *pairs[0].grid[1:]) for pairs in videos])
    for _ in range(count):
        theirs.model.rope_deltas = None
        marks = {IMAGE_ID: 1, VIDEO_ID: 2}
        types = torch.tensor([[marks.get(token, 0) for token in tokens]])
        logits = theirs(input_ids=torch.tensor([tokens]), mm_token_type_ids=types, **given).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
