"""What a server that takes pictures needs in tests: a tokenizer with the marks of a tower, a template as Qwen3.5 publishes it, and pictures
as data URLs."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from support.published_pictures import FIELDS, encoded, picture
from support.published_videos import FIELDS as VIDEO_FIELDS
from support.scripted import MODEL, scripted
from support.texts import byte_tokenizer
from tokenizers import AddedToken

from npucompile.graphs.types import Bucket
from npucompile.models.config import PICTURE_TOKENS as ID_FIELDS
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.pictures.limits import DecoderLimits, PictureLimits, RequestLimits
from npucompile.server.pictures.pool import DecoderPool
from npucompile.server.pictures.processor import processor_of
from npucompile.server.pictures.reader import PictureReader, Vision
from npucompile.server.pictures.videos import processor_of as video_processor_of
from npucompile.server.text.tokenizer import TextTokenizer

START, END, IMAGE, VIDEO = MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PLACE = f"{START}{IMAGE}{END}"
IMAGE_ID, VIDEO_ID = 258, 259
TURN = "<|im_start|>"

TEMPLATE = """\
{%- set shown = namespace(count=0) %}
{%- macro content(message, is_system) %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for item in message.content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system %}{{ raise_exception('System message cannot contain images.') }}{% endif %}
                {%- set shown.count = shown.count + 1 %}
                {%- if add_vision_id %}{{- 'Picture ' ~ shown.count ~ ': ' }}{% endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'video' in item or item.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + content(message, message.role == 'system') | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""How the published template of Qwen3.5 writes messages and their pictures."""

FORM = ChatFormat(ChatTemplate(TEMPLATE))
SHOWING = replace(MODEL, vocab_size=260)
SMALL = FIELDS | {"size": {"shortest_edge": 1024, "longest_edge": 65536}}
"""A processor of small pictures."""
SMALL_VIDEOS = VIDEO_FIELDS | {"max_frames": 6}


def codec() -> TextTokenizer:
    """A byte is a token, and so are the marks of pictures, from 256 on."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS])
    return TextTokenizer(tokenizer)


VIDEOS = replace(video_processor_of(SMALL_VIDEOS, "video_preprocessor_config.json"), frame_pixels=65536)
VISION = Vision(processor_of(SMALL, "preprocessor_config.json"), 256, IMAGE, VIDEO, START, END, IMAGE_ID, VIDEO_ID, VIDEOS)


def url(height: int = 64, width: int = 96, seed: int = 1, mode: str = "RGB", form: str = "PNG", **options: Any) -> str:
    """A picture of (height / 32) (width / 32) tokens as a data URL."""
    return data_url(encoded(picture(height, width, seed, mode), form, **options), form.lower())


def data_url(data: bytes, kind: str = "png", media: str = "image") -> str:
    return f"data:{media}/{kind};base64,{base64.b64encode(data).decode()}"


@contextlib.contextmanager
def reader(
    pictures: PictureLimits | None = None, requests: RequestLimits | None = None, decoders: DecoderLimits | None = None, **options: Any
) -> Iterator[PictureReader]:
    """A reader of pictures with processes of its own."""
    pictures = pictures or PictureLimits()
    videos = {"videos": options["videos"]} if "videos" in options else {}
    with contextlib.closing(DecoderPool(decoders or DecoderLimits(1), pictures, **videos)) as pool:
        yield PictureReader(options.pop("vision", VISION), pictures, requests or RequestLimits(), pool, **options)


@contextlib.contextmanager
def showing(says: Callable[[str], str] = lambda _: "ok", taken: PictureReader | None = None, **options: Any) -> Iterator[tuple[str, Any]]:
    """A server that takes pictures: `scripted` with them."""
    with contextlib.ExitStack() as stack:
        taken = taken or stack.enter_context(reader())
        defaults = {"chat": FORM, "model": SHOWING, "codec": codec(), "pictures": taken}
        yield stack.enter_context(scripted(says, **{**defaults, **options}))


IDS = dict(zip(ID_FIELDS, (258, 259, 256, 257), strict=True))


def artifact(sizes: tuple[int, ...] = (64, 256), tower: bool = True, ids: dict[str, int] = IDS, **more: Any) -> Any:
    """What is asked of an artifact that encodes pictures of so many patches."""
    buckets = [Bucket("decode", 1, 1), *(Bucket("encode", 1, size) for size in sizes)]
    model = {"tower": {"key": "vision", "processor": asdict(VISION.processor), "ids": ids, **more}} if tower else {}
    return SimpleNamespace(manifest=SimpleNamespace(model=model, graphs=[SimpleNamespace(bucket=bucket) for bucket in buckets]))
