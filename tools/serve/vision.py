"""What an artifact takes beside text, as its manifest says it, and what reads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...graphs.steps.table import kind_of
from ...lowering.artifact.artifact import Artifact
from ...models.config import PICTURE_TOKENS
from ...server.engine.service import TEXT_ALONE, Service
from ...server.pictures.limits import MediaLimits
from ...server.pictures.media import Hosts
from ...server.pictures.pool import DecoderPool
from ...server.pictures.processor import PictureProcessor
from ...server.pictures.reader import PictureReader, Vision, fetch_nothing
from ...server.pictures.videos import VideoProcessor
from ...server.requests.pictures import Kind
from ...server.text.tokenizer import TextTokenizer

TOWER, IDS, PROCESSOR, VIDEOS = "tower", "ids", "processor", "videos"
"""Fields of a manifest's model."""


def tower_of(artifact: Artifact) -> Vision | str:
    """What the tower of an artifact takes, without texts of its tokens; where it takes text alone, a sentence that says what takes more."""
    model = artifact.manifest.model
    patches = [entry.bucket.q_len for entry in artifact.manifest.graphs if kind_of(entry.bucket).tower]
    if TOWER not in model or not patches:
        return TEXT_ALONE
    ids: Mapping[str, int] = model[TOWER][IDS]
    processor = msgspec.convert(model[TOWER][PROCESSOR], PictureProcessor)
    most = max(patches)
    bounded = processor.with_limits(max_pixels=min(processor.max_pixels, most * processor.patch_size**2))
    return Vision(bounded, most, "", "", "", "", ids[PICTURE_TOKENS[0]], ids[PICTURE_TOKENS[1]], _videos(model[TOWER], most))


def vision_of(artifact: Artifact, codec: TextTokenizer, media: MediaLimits | None = None, *, paired: bool = False) -> Vision | str:
    """`tower_of` with texts, for a server; where that takes text alone, a sentence that says why and what would take pictures."""
    tower = tower_of(artifact)
    if isinstance(tower, str):
        return tower
    if media and media.text_alone:
        return "it was started with --language-model-only or a limit of no images; legal is text, or a server without that"
    if paired:
        return "it computes prompts for decode servers, and hands none with pictures over; legal is text, or a server with --role both"
    texts: list[str] = []
    for name, token in ids_of(artifact).items():
        text = codec.library.id_to_token(token)
        if text is None or codec.encode(text, add_special=False) != (token,):
            legal = "legal is text, or an artifact of a checkpoint whose tokenizer has the tokens that its config.json names"
            return f"its tokenizer has no token for {name} {token}; {legal}"
        texts.append(text)
    image, video, start, end = texts
    return replace(tower, image=image, video=video, start=start, end=end)


def ids_of(artifact: Artifact) -> dict[str, int]:
    """The tokens of pictures and videos in prompts of an artifact with a tower, by the names in PICTURE_TOKENS and in their order."""
    return {name: artifact.manifest.model[TOWER][IDS][name] for name in PICTURE_TOKENS}


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
    most: Mapping[Kind, int] = {"image": media.picture.max_bytes, "video": media.video.max_bytes}
    fetch = Hosts(media.request.hosts, most).fetch if media.request.hosts else fetch_nothing
    return PictureReader(vision, media.picture, media.request, pool, fetch, media.video)
