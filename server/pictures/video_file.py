"""Bytes of a video -> its frames, within limits that are checked before a frame is decoded, and while they are.

Formats are read from the bytes, and only their readers and decoders are asked (CVE-2026-22778 was a picture format inside a video). What a
decoder says is never told.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs.errors import RequestError
from .limits import VideoLimits
from .videos import FramePair, VideoProcessor

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
"""Legal formats of frames by their names in FFmpeg."""

_FORMATS = "MP4, MOV, WebM, Matroska and AVI with frames of " + ", ".join(CODECS)
_DECODERS = (*CODECS, "libdav1d")  # av1's is a library of another name
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # QuickTime's first box has one of these types


DEFAULT_LIMITS = VideoLimits()


@dataclass(frozen=True)
class VideoHeader:
    """What a video's file says of it.

    Attributes:
        frames: of the video, or as many as it has packets.
        rate: frames a second; None where the file does not say.
        height, width: of a frame, before it is turned.
    """

    frames: int
    rate: float | None
    height: int
    width: int


def read_header(data: bytes, limits: VideoLimits = DEFAULT_LIMITS, param: str | None = None) -> VideoHeader:
    """What the file of a video says, of which no frame is decoded beyond what finding its size takes. Errors of `read_video`."""
    return _Reader(data, limits, param).header


def read_video(
    data: bytes, processor: VideoProcessor, limits: VideoLimits = DEFAULT_LIMITS, param: str | None = None
) -> tuple[FramePair, ...]:
    """The sampled frames of a video as they are meant to be seen, cut into patches.

    Args:
        param: the request field that it came in, for errors.

    Raises:
        RequestError: it is empty, above a limit, of another format, or damaged; or `processor` refuses it, or nothing here decodes videos.
    """
    reader = _Reader(data, limits, param)
    frames, rate = reader.header.frames, reader.header.rate
    while True:
        indices = processor.sampled(frames, rate)
        try:
            return tuple(processor.pairs(reader.decoded(indices), indices, rate, param))
        except _Fewer as found:
            # A file may count frames that no player shows, before the start of an edit list or behind its end.
            frames = found.frames


class _Fewer(Exception):
    """A video had fewer frames than its file says."""

    def __init__(self, frames: int):
        super().__init__(frames)
        self.frames = frames


class _Reader:
    """A video whose header is within limits."""

    def __init__(self, data: bytes, limits: VideoLimits, param: str | None):
        if not data:
            raise RequestError(f"the video has no bytes; legal is a file of {_FORMATS}", param=param, code="empty_video_file")
        if len(data) > limits.max_bytes:
            message = f"the video has {len(data)} bytes; legal are up to {limits.max_bytes}"
            raise RequestError(message, param=param, code="video_file_too_large")
        self._data, self._limits, self._param = data, limits, param
        self._deadline = time.monotonic() + limits.max_seconds
        with self._opened() as (container, stream):
            rate = float(stream.average_rate) if stream.average_rate else None
            frames = max(stream.frames, 0)
            if not frames:
                for packet in container.demux(stream):
                    frames += packet.size > 0
                    if frames > limits.max_frames:
                        break
            self.header = VideoHeader(frames, rate, stream.height, stream.width)
        if frames > limits.max_frames:
            message = f"the video has {frames} frames or more; legal are up to {limits.max_frames}"
            raise RequestError(message, param=param, code="video_too_large")
        if not frames:
            raise self._damaged()

    def decoded(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """The frames [3, height, width] u8 of ascending indices.

        Raises:
            _Fewer: the last index is behind the last frame.
        """
        wanted, last, seen, size = set(indices), indices[-1], 0, None
        with self._opened() as (container, stream):
            for frame in container.decode(stream):
                if time.monotonic() > self._deadline:
                    message = f"decoding the video takes more than {self._limits.max_seconds} seconds; legal is a shorter or a smaller one"
                    raise RequestError(message, param=self._param, code="video_too_large")
                self._check_size(frame.width, frame.height)
                if (size := size or (frame.width, frame.height)) != (frame.width, frame.height):
                    raise self._damaged()
                if seen in wanted:
                    yield _rgb(frame)
                seen += 1
                if seen > last:
                    return
        if not seen:
            raise self._damaged()
        raise _Fewer(seen)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first video stream, of a legal format and size."""
        av, param, limits = _decoder(self._param), self._param, self._limits
        form = _format(self._data)
        if form is None:
            message = f"the video is of no format that is read here; legal are {_FORMATS}"
            raise RequestError(message, param=param, code="unsupported_video_media_type")
        # Both are read by the decoders that look into the first frames, too. Decoders round sides up to their blocks, of 128 at most.
        bound = str(max(4 * limits.max_pixels, 2**20))
        options = {"codec_whitelist": ",".join(_DECODERS), "max_pixels": bound}
        try:
            with av.open(io.BytesIO(self._data), format=form, options=options) as container:
                stream = next(iter(container.streams.video), None)
                if stream is None or (codec := stream.codec_context.codec.canonical_name) not in CODECS:
                    found = "no frames" if stream is None else f"frames of {codec}"
                    message = f"the video has {found}; legal are {_FORMATS}"
                    raise RequestError(message, param=param, code="unsupported_video_media_type")
                self._check_size(stream.width, stream.height)
                context = stream.codec_context
                context.thread_count, context.options = 1, {"max_pixels": bound}
                yield container, stream
        except (RequestError, _Fewer):
            raise
        except Exception:  # Decoders raise whatever the bytes lead them to; none of it is the server's failure.
            raise self._damaged() from None

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._limits.max_pixels:
            message = f"the video has frames of {width}x{height} pixels; legal are up to {self._limits.max_pixels}"
            raise RequestError(message, param=self._param, code="video_too_large")

    def _damaged(self) -> RequestError:
        message = f"the video cannot be decoded: its file is cut or damaged; legal is a whole file of {_FORMATS}"
        return RequestError(message, param=self._param, code="video_parse_error")


def _decoder(param: str | None) -> Any:
    try:
        import av
    except ImportError:
        message = "this server reads no videos, for PyAV is not installed (the extra video); legal are pictures and text"
        raise RequestError(message, param=param, code="unsupported_video_media_type") from None
    return av


def _format(data: bytes) -> str | None:
    """FFmpeg's name of the container, by its first bytes."""
    if data[4:8] in _BOXES:
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else None


def _rgb(frame: Any) -> torch.Tensor:
    """[3, height, width] u8, turned as its file says, by quarters."""
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    return torch.rot90(pixels, round(frame.rotation / 90) % 4, (1, 2)).contiguous()
