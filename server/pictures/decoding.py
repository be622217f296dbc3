"""Bytes of a picture -> its pixels, within limits that are checked before a pixel is decoded.

Which format it is, is read from the bytes. What a decoder says is never told: its texts have held addresses of memory (CVE-2026-22778).
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ...graphs.errors import RequestError
from .limits import CHANNELS, MOST_PIXELS, PictureLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Legal formats by their names in Pillow, which tries no other: EPS starts Ghostscript, and PSD wrote out of bounds (CVE-2026-25990)."""

MOST_SCANS = 64
"""Of a JPEG. Each costs as much as all its pixels, and a few bytes; libjpeg writes 10, and mozjpeg as many or a few more."""

_WHITE = (255, 255, 255, 255)
_SCAN = b"\xff\xda"
_ORIENTATION = 0x0112  # tag of EXIF (CIPA DC-008)
_UPRIGHT: Mapping[object, tuple[bool, int, int]] = {
    2: (False, 1, -1), 3: (False, -1, -1), 4: (False, -1, 1), 5: (True, 1, 1), 6: (True, -1, 1), 7: (True, -1, -1), 8: (True, 1, -1),
}  # fmt: skip
"""How rows of the file lie in the upright picture, by its orientation: whether as columns, and the steps from row to row and within."""

_BAND_PIXELS = 2**20
"""Converted at once: a large picture whose pixels are transparent would need four copies of itself."""


DEFAULT_LIMITS = PictureLimits()


def decode(data: bytes, limits: PictureLimits = DEFAULT_LIMITS, param: str | None = None) -> torch.Tensor:
    """The first frame of a picture as it is meant to be seen: turned as its EXIF says, what is transparent on white, gray as RGB.

    Grays of 16 bits keep their upper 8. This differs from some published loaders (docs/decisions/069). A process decodes in one thread at
    a time: filters of warnings, which are its own, are set meanwhile.

    Args:
        param: the request field that it came in, for errors.

    Returns:
        [3, height, width] u8, contiguous.

    Raises:
        RequestError: it is empty, larger than a limit, of another format, or damaged; its code is one of OpenAI's.
    """
    with _opened(data, limits, param) as image:
        return _pixels(image)


def size(data: bytes, limits: PictureLimits = DEFAULT_LIMITS, param: str | None = None) -> tuple[int, int]:
    """Height and width of a picture as its header says them, before it is turned; no pixel is decoded. Arguments and errors of `decode`."""
    with _opened(data, limits, param) as image:
        return image.height, image.width


@contextlib.contextmanager
def _opened(data: bytes, limits: PictureLimits, param: str | None) -> Iterator[Image.Image]:
    """A picture whose header is read and legal; whatever is raised within becomes the request's error."""
    if not data:
        raise RequestError("the picture has no bytes; legal is a file of " + _legal(), param=param, code="empty_image_file")
    if len(data) > limits.max_bytes:
        message = f"the picture has {len(data)} bytes; legal are up to {limits.max_bytes}"
        raise RequestError(message, param=param, code="image_file_too_large")
    try:
        # Pillow warns of what it goes on with, in the words of the file, and each new text would be kept.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > limits.max_pixels:
                raise _too_large(f"{image.width}x{image.height} pixels", limits, param)
            if image.format == "JPEG" and (scans := _scans(data)) > MOST_SCANS:
                message = f"the picture has {scans} scans; legal are up to {MOST_SCANS}"
                raise RequestError(message, param=param, code="image_parse_error")
            yield image
    except RequestError:
        raise
    except UnidentifiedImageError:
        message = f"the picture is of no format that is read here, or its header is damaged; legal are {_legal()}"
        raise RequestError(message, param=param, code="unsupported_image_media_type") from None
    except Image.DecompressionBombError:
        raise _too_large(f"more than {MOST_PIXELS} pixels", limits, param) from None
    except Exception:  # Decoders raise whatever the bytes lead them to; none of it is the server's failure.
        message = "the picture cannot be decoded: its file is cut or damaged; legal is a whole file of " + _legal()
        raise RequestError(message, param=param, code="image_parse_error") from None


def _scans(data: bytes) -> int:
    """Scans of a JPEG: what is before the first of them, such as EXIF, may hold their mark as well."""
    place = 2
    while data[place : place + 1] == b"\xff" and data[place + 1 : place + 2] != _SCAN[1:]:
        # A fill byte is a mark's first, without a length.
        place += 1 if data[place + 1 : place + 2] == b"\xff" else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return data.count(_SCAN, place)


def _legal() -> str:
    return ", ".join(FORMATS)


def _too_large(found: str, limits: PictureLimits, param: str | None) -> RequestError:
    return RequestError(f"the picture has {found}; legal are up to {limits.max_pixels}", param=param, code="image_too_large")


def _pixels(image: Image.Image) -> torch.Tensor:
    """[3, height, width] u8."""
    image.load()
    # A PNG may have its EXIF behind the pixels, so that it is asked for after them.
    turned, down, right = _UPRIGHT.get(_orientation(image), (False, 1, 1))
    width, height = image.size
    upright = np.empty((CHANNELS, width, height) if turned else (CHANNELS, height, width), np.uint8)
    as_in_file = (upright.transpose(0, 2, 1) if turned else upright)[:, ::down, ::right]
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = _rgb(image.crop((0, top, width, min(top + rows, height))))
        as_in_file[:, top : top + rows] = np.asarray(band).transpose(2, 0, 1)
    return torch.from_numpy(upright)


def _orientation(image: Image.Image) -> object:
    """Of damaged EXIF none: it is beside the picture, which is whole."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:
        return None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would clip instead: all but the darkest 256 of 65,536 levels would be white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return image.convert("RGB")
