"""The process that decodes pictures: a task in, patches or an error out, until its input ends (`pool.DecoderPool` starts it).

Decoders of pictures are written in C and read what strangers send. So they run where a crash costs one picture, with little memory, no
files to write and nothing of the server's to read; what they say to the server is plain data.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
from typing import IO, Literal

import msgspec
import torch

from ...graphs.errors import RequestError
from .decoding import decode, size
from .limits import PictureLimits, VideoLimits
from .processor import PictureProcessor
from .video_file import read_header, read_video
from .videos import VideoProcessor

NICENESS = 3
"""Steps of a model on the same CPU come first, and leave a share."""

SPARE_FILES = 8
_LENGTH_BYTES = 8


class DecodeTask(msgspec.Struct, frozen=True):
    """What is to become of a picture, or of a video.

    Attributes:
        data: its file.
        max_bytes, max_pixels: of `PictureLimits`, or of `VideoLimits`.
        time_s: after which the process ends itself; its server does it earlier, if it still runs.
        processor: of `PictureProcessor`, or of `VideoProcessor`; None asks for what the header says.
        max_frames: of `VideoLimits`; 0 for a picture.
    """

    data: bytes
    max_bytes: int
    max_pixels: int
    time_s: float
    processor: dict[str, int | float | tuple[float, ...] | None] | None = None
    max_frames: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What has become of it.

    Attributes:
        size, frames, rate: height and width in its header, and of a video what `VideoHeader` has.
        grid, pixels: of `processor.Picture`, or of all pairs of frames of a video, one behind the other.
        seconds: of each of these.
        error, code: of the request, if the picture is not legal.
    """

    size: tuple[int, int] = (0, 0)
    frames: int = 0
    rate: float | None = None
    grid: tuple[Literal[1], int, int] = (1, 0, 0)
    pixels: bytes = b""
    seconds: tuple[float, ...] = ()
    error: str = ""
    code: str = ""


def outcome(task: DecodeTask) -> Outcome:
    """Decodes a picture or a video."""
    try:
        if task.max_frames:
            return _video(task)
        limits = PictureLimits(task.max_bytes, task.max_pixels)
        if task.processor is None:
            return Outcome(size(task.data, limits))
        picture = PictureProcessor(**task.processor).picture(decode(task.data, limits))  # type: ignore[arg-type]
    except RequestError as error:
        return Outcome(error=str(error), code=error.code or "image_parse_error")
    return Outcome(grid=(1, *picture.grid[1:]), pixels=picture.pixels.numpy().tobytes())


def _video(task: DecodeTask) -> Outcome:
    limits = VideoLimits(task.max_bytes, task.max_pixels, task.max_frames, task.time_s)
    if task.processor is None:
        header = read_header(task.data, limits)
        return Outcome((header.height, header.width), header.frames, header.rate)
    pairs = read_video(task.data, VideoProcessor(**task.processor), limits)  # type: ignore[arg-type]
    pixels = b"".join(pair.picture.pixels.numpy().tobytes() for pair in pairs)
    return Outcome(grid=(1, *pairs[0].picture.grid[1:]), pixels=pixels, seconds=tuple(pair.seconds for pair in pairs))


def write(stream: IO[bytes], message: DecodeTask | Outcome) -> None:
    """Sends a message behind its length."""
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(payload)
    stream.flush()


def read(stream: IO[bytes], max_bytes: int) -> bytes | None:
    """The next message; None where the stream ends within it, or it is longer than is legal."""
    head = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    if len(head) < _LENGTH_BYTES or length > max_bytes:
        return None
    payload = stream.read(length)
    return payload if len(payload) == length else None


def limit(memory_bytes: int) -> None:
    """Takes from this process what decoding does not need: memory beyond this much more, new files, and the writing of any."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most = size_bytes + memory_bytes
    for kind, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, SPARE_FILES),
    ):
        resource.setrlimit(kind, (value, value))


def main(memory_bytes: int) -> None:
    """Serves tasks from standard input to its end."""
    os.nice(NICENESS)
    # A terminal's signals are for the server, which still answers what it has.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import av  # noqa: F401 - what it takes is not a video's
    limit(memory_bytes)
    # It has started: from now on its tasks are timed.
    write(sys.stdout.buffer, Outcome())
    while (payload := read(sys.stdin.buffer, sys.maxsize)) is not None:
        task = msgspec.msgpack.decode(payload, type=DecodeTask)
        # By the signal's own action, which a decoder that hangs in C cannot put off.
        signal.alarm(math.ceil(task.time_s) + 1)
        done = outcome(task)
        signal.alarm(0)
        write(sys.stdout.buffer, done)


if __name__ == "__main__":
    main(int(sys.argv[1]))
