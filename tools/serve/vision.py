"""What an artifact takes beside text, as its manifest says it, and what reads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...lowering.artifact.artifact import Artifact
from ...models.vision import IDS as MARKS
from ...server.engine.service import TEXT_ALONE, Service
from ...server.pictures.limits import MediaLimits
from ...server.pictures.media import Hosts
from ...server.pictures.pool import DecoderPool
from ...server.pictures.processor import PictureProcessor
from ...server.pictures.reader import PictureReader, Vision, fetch_nothing
from ...server.pictures.videos import VideoProcessor
from ...server.text.tokenizer import TextTokenizer

TOWER, IDS, PROCESSOR, VIDEOS = "tower", "ids", "processor", "videos"
"""Fields of a manifest's model."""


def vision_of(artifact: Artifact, codec: TextTokenizer, media: MediaLimits | None = None, *, paired: bool = False) -> Vision | str:
    """What the tower of an artifact takes; where its server takes text alone, a sentence that says why and what would take pictures."""
    model = artifact.manifest.model
    patches = [entry.bucket.q_len for entry in artifact.manifest.graphs if entry.bucket.kind == "encode"]
    if TOWER not in model or not patches:
        return TEXT_ALONE
    if media and media.text_alone:
        return "it was started with --language-model-only or a limit of no images; legal is text, or a server without that"
    if paired:
        return "prompts with pictures are not handed over between prefill and decode servers; legal is text, or a server with --role both"
    ids: Mapping[str, int] = model[TOWER][IDS]
    texts: list[str] = []
    for name in MARKS:
        text = codec.library.id_to_token(ids[name])
        if text is None or codec.encode(text, add_special=False) != (ids[name],):
            legal = "legal is text, or an artifact of a checkpoint whose tokenizer has the tokens that its config.json names"
            return f"its tokenizer has no token for {name} {ids[name]}; {legal}"
        texts.append(text)
    image, video, start, end = texts
    processor = msgspec.convert(model[TOWER][PROCESSOR], PictureProcessor)
    most = max(patches)
    bounded = processor.with_limits(max_pixels=min(processor.max_pixels, most * processor.patch_size**2))
    return Vision(bounded, most, image, video, start, end, ids[MARKS[0]], ids[MARKS[1]], _videos(model[TOWER], most))


def _videos(tower: Mapping[str, Any], most: int) -> VideoProcessor | str:
    """The processor of videos, whose frames have no more patches than an encode bucket; or why there is none."""
    if tower.get(VIDEOS) is None:
        return "its artifact was built without the checkpoint's video_preprocessor_config.json; legal are pictures"
    if importlib.util.find_spec("av") is None:
        return "PyAV is not installed (npucompile[video]); legal are pictures"
    processor = msgspec.convert(tower[VIDEOS], VideoProcessor)
    return replace(processor, frame_pixels=most * processor.patch_size**2)


def said_of_pictures(service: Service) -> list[str]:
    """A line that says what a server takes beside text; none where that is nothing."""
    if service.pictures is None:
        return []
    vision, limits = service.pictures.vision, service.pictures.limits
    videos = "" if isinstance(vision.videos, str) else f" and {limits.videos} videos"
    return [f"takes {limits.images} pictures{videos} a request, and reads pictures at up to {vision.processor.max_pixels} pixels"]


def reader_of(vision: Vision, media: MediaLimits) -> PictureReader:
    """What reads the pictures of requests, with its processes."""
    pool = DecoderPool(media.decoders, media.picture, videos=media.video)
    fetch = Hosts(media.request.hosts, media.picture.max_bytes).fetch if media.request.hosts else fetch_nothing
    return PictureReader(vision, media.picture, media.request, pool, fetch, media.video)
