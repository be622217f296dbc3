"""Limits on pictures; nothing here loads torch, as options of commands are read from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...graphs.errors import SpecError

CHANNELS = 3

MOST_FRAMES = 2**14
"""Frames that a request may ask for; the published processor takes 768."""

MOST_PIXELS = 89_478_485
"""Above it Pillow takes a picture for a decompression bomb (`Image.MAX_IMAGE_PIXELS`)."""


@dataclass(frozen=True)
class PictureLimits:
    """Limits on one picture.

    Attributes:
        max_bytes: of its file.
        max_pixels: of the picture that the file holds, before it is resized; `decoder_memory` says what it takes.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 2**26

    def __post_init__(self) -> None:
        for name, most in (("max_bytes", 2**31 - 1), ("max_pixels", MOST_PIXELS)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise SpecError(f"{name} of a picture is {value}; legal is 1 to {most}")


@dataclass(frozen=True)
class VideoLimits:
    """Limits on one video.

    Attributes:
        max_bytes: of its file.
        max_pixels: of a frame before it is resized.
        max_frames: of the file, each of which is decoded, whether it is sampled or not.
        max_seconds: that decoding may take.
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 2**23
    max_frames: int = 2**15
    max_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, most in (("max_bytes", 2**31 - 1), ("max_pixels", 2**26), ("max_frames", 2**20), ("max_seconds", 3600)):
            if not 0 < (value := getattr(self, name)) <= most:
                raise SpecError(f"{name} of a video is {value}; legal is above 0, up to {most}")


def decoder_memory(max_pixels: int) -> int:
    """Bytes that a picture of so many pixels may take, or a video: a WebP takes 16 a pixel, more than other formats."""
    return max(2**30, 2**26 + 20 * max_pixels)


@dataclass(frozen=True)
class DecoderLimits:
    """Limits on the processes that decode.

    Attributes:
        processes: that decode at once; other pictures wait.
        time_s: of one picture.
        memory_bytes: of one process, beside what it takes without a picture.
    """

    processes: int = 2
    time_s: float = 20.0
    memory_bytes: int = decoder_memory(PictureLimits.max_pixels)

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("time_s", 0.01), ("memory_bytes", 2**24)):
            if not (value := getattr(self, name)) >= least:
                raise SpecError(f"{name} of decoders is {value}; legal is at least {least}")


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the pictures of requests.

    Attributes:
        images, videos: of a request.
        cache_bytes: of patches that are kept for requests with the same picture.
        hosts: from which pictures are fetched, as `media.Hosts` reads them.
    """

    images: int = 8
    videos: int = 1
    cache_bytes: int = 2**28
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class MediaLimits:
    """All limits on what a server takes beside text.

    Attributes:
        text_alone: takes no pictures, whatever the artifact encodes.
    """

    picture: PictureLimits = field(default_factory=PictureLimits)
    decoders: DecoderLimits = field(default_factory=DecoderLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    text_alone: bool = False
    video: VideoLimits = field(default_factory=VideoLimits)
