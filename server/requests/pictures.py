"""Pictures as requests have them: data URLs, and URLs of hosts that a server may fetch from."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from ...graphs.errors import RequestError
from .bodies import Body
from .fields import FieldError, show

Kind = Literal["image", "video"]
NOUNS: Mapping[Kind, str] = {"image": "picture", "video": "video"}
EXAMPLES: Mapping[Kind, str] = {"image": "data:image/png;base64", "video": "data:video/mp4;base64"}

DATA, FETCHED = "data:", ("http://", "https://")
BASE64 = "base64"
PIECE_CHARS = 2**20
"""Decoded at once, of a multiple of four: no other thread runs meanwhile."""

Detail = Literal["auto", "low", "high", "original"]
"""Legal, and without effect, as in vLLM: `mm_processor_kwargs` says how large pictures are read."""


class ProcessorFields(Body):
    """`mm_processor_kwargs`: the area in pixels that pictures of a request are resized to, that of a video's frames together, and how many
    of them are taken."""

    min_pixels: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_pixels: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    max_frames: Annotated[int, Field(ge=1, lt=2**31)] | None = None


@dataclass(frozen=True, eq=False)
class PictureBytes:
    """The bytes of a picture that a client sent, or that was fetched."""

    data: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256."""
        return hashlib.sha256(self.data).digest()


@dataclass(eq=False)
class PicturePart:
    """A picture or a video in the content of a message.

    Attributes:
        kind: which of them.
        url: that it has in the request; "" once it is a file.
        param: the field of the request that has the URL, for errors.
        file: None until the URL is read.
    """

    url: str
    param: str
    file: PictureBytes | None = None
    kind: Kind = "image"

    def __repr__(self) -> str:
        """Without what the picture shows, as logs may have it."""
        return f"PicturePart({self.param}, {self.size_bytes} bytes)"

    @property
    def size_bytes(self) -> int:
        """Of the URL, or of the file in its place."""
        return len(self.url) if self.file is None else len(self.file.data)


class UrlText:
    """A URL in a body, which may be megabytes: who takes it leaves none, as bodies live as long as their answers."""

    def __init__(self, text: str) -> None:
        self._text = text

    def take(self) -> str:
        """The URL; "" the second time."""
        text, self._text = self._text, ""
        return text


def url_text(value: object) -> UrlText:
    """Reads a URL for a body's model."""
    if not isinstance(value, str):
        raise ValueError("a string")
    return UrlText(value)


Content = str | PicturePart
"""A part of a message: text, or a picture or a video."""


def picture_part(url: object, param: str, kind: Kind = "image") -> PicturePart:
    """A picture or a video of a URL, whose file is not looked at yet.

    Raises:
        FieldError: it is no URL of a kind that may be legal (code invalid_image_url, or invalid_video_url).
    """
    if isinstance(url, str) and url[:8].lower().startswith((DATA, *FETCHED)):
        return PicturePart(url, param, kind=kind)
    message = f"{param} is {show(url)}; legal is a data URL, {EXAMPLES[kind]},... with the {NOUNS[kind]} in base64"
    raise FieldError(message, param=param, code=f"invalid_{kind}_url")


def is_data(url: str) -> bool:
    """Whether a URL has its picture in itself."""
    return url[: len(DATA)].lower() == DATA


def data_of(url: str, param: str, max_bytes: int, media: Kind = "image") -> bytes:
    """The bytes in a data URL. Of what type it says they are, only that it is an image, or a video: which one is read from the bytes.

    Raises:
        RequestError: it is of another type, no strict base64 (RFC 4648, section 4), or has more bytes than are legal.
    """
    # The text is megabytes, of which no copy is made.
    start = url.find(",") + 1
    kind, *parameters = url[len(DATA) : max(0, start - 1)].lower().split(";")
    size = len(url) - start
    if not start or BASE64 not in parameters[-1:]:
        message = f"{param} is a data URL without base64; legal is {EXAMPLES[media]},..."
        raise RequestError(message, param=param, code=f"invalid_{media}_url")
    if not kind.startswith(f"{media}/"):
        message = f"{param} is a data URL of type {show(kind)}; legal is a type of {media}/"
        raise RequestError(message, param=param, code=f"unsupported_{media}_media_type")
    # Known before anything is decoded; base64 makes 4 characters of 3 bytes.
    if (least := size // 4 * 3 - 2) > max_bytes:
        message = f"{param} has at least {least} bytes; legal are up to {max_bytes}"
        raise RequestError(message, param=param, code=f"{media}_file_too_large")
    try:
        # The library lets three padding characters pass.
        if size % 4 or url.endswith("===", start) or url.find("=", start, len(url) - 2) >= 0:
            raise ValueError
        pieces = (url[at : at + PIECE_CHARS] for at in range(start, len(url), PIECE_CHARS))
        return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    except (binascii.Error, ValueError):
        message = f"{param} holds other than base64; legal are its 64 characters without blanks, padded with ="
        raise RequestError(message, param=param, code=f"invalid_base64_{media}") from None
