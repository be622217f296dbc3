"""Video files of known frames, written by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def shade(index: int) -> int:
    """Gray of the frame of an index, far enough from its neighbours' to be told apart after a lossy codec."""
    return 20 + index * 53 % 210


def frame(index: int, height: int = 64, width: int = 96) -> npt.NDArray[np.uint8]:
    """[height, width, 3] u8: a gray, with a red corner at the upper left."""
    pixels = np.full((height, width, 3), shade(index), np.uint8)
    pixels[: height // 4, : width // 4] = (255, 0, 0)
    return pixels


def video(
    count: int = 12,
    codec: str = "libx264",
    form: str = "mp4",
    rate: int = 4,
    frames: Iterable[npt.NDArray[np.uint8]] | None = None,
    **options: str,
) -> bytes:
    """The bytes of a video file of `frame`s, or of others."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        given = list(frames or (frame(index) for index in range(count)))
        stream.height, stream.width = given[0].shape[:2]
        stream.pix_fmt = {"mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for pixels in given:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def turned(data: bytes) -> bytes:
    """An MP4 whose matrix of display turns it by 90 degrees clockwise, as telephones write what they film upright."""
    identity = [1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30]
    clockwise = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    old, new = (b"".join(value.to_bytes(4, "big", signed=True) for value in matrix) for matrix in (identity, clockwise))
    at = data.index(old, data.index(b"tkhd"))
    return data[:at] + new + data[at + len(old) :]
