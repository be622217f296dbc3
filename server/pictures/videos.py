"""Preprocessing of videos as the published processor of Qwen's vision towers does it, bit for bit (docs/decisions/069).

Source of the rules: transformers 5.23, models/qwen3_vl/{video_processing,processing}_qwen3_vl.py, which the checkpoints name. The text
around frames is vLLM's (vllm/model_executor/models/qwen3_vl.py): what the template writes for a video, vision_start, a placeholder and
vision_end, is replaced whole. transformers 5.23 replaces the placeholder alone, so that a second pair of marks stays around all frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...graphs.errors import ConfigError, RequestError
from .limits import MOST_FRAMES
from .processor import MOST_RATIO, PatchProcessor, Picture, read_files

FILES = ("video_preprocessor_config.json", "processor_config.json")
NESTED = "video_processor"
"""Field of the second file that holds what the first one is."""

UNKNOWN_RATE = 24.0
"""Frames a second of a video whose file does not say."""


@dataclass(frozen=True)
class FramePair:
    """Frames that a patch spans, which are encoded like a picture of their own.

    Attributes:
        picture: their patches [N, 3 T P P] u8.
        seconds: when they are seen, from the start of the video.
    """

    picture: Picture
    seconds: float

    @property
    def text(self) -> str:
        """What stands in the prompt before vision_start, as many placeholders as the picture has tokens, and vision_end."""
        return text_at(self.seconds)


def text_at(seconds: float) -> str:
    """The text of a time."""
    return f"<{seconds:.1f} seconds>"


@dataclass(frozen=True)
class Video:
    """A video that was sampled, resized and cut into patches: its pairs of frames, all of one size."""

    pairs: tuple[FramePair, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the language model that they take the places of, without the text between them."""
        return sum(pair.picture.tokens for pair in self.pairs)

    @property
    def size_bytes(self) -> int:
        """Of the patches."""
        return sum(pair.picture.size_bytes for pair in self.pairs)


@dataclass(frozen=True)
class VideoProcessor(PatchProcessor):
    """The processor of videos.

    Attributes:
        fps: sampled frames a second.
        min_frames, max_frames: sampled; a video of fewer is sampled whole.
        frame_tokens: most tokens of a frame, or None: as qwen-vl-utils bounds them.
        frame_pixels: most of a frame, a server's bound, or None.
    """

    fps: float
    min_frames: int
    max_frames: int
    frame_tokens: int | None
    frame_pixels: int | None = None

    def with_options(
        self, fps: float | None = None, max_frames: int | None = None, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> VideoProcessor:
        """The same with other options, of a request.

        Raises:
            RequestError: no frame would be sampled, or no frame would fit.
        """
        most = max_frames or self.max_frames
        least = min(self.min_frames, most)
        limits = (min_pixels or self.min_pixels, max_pixels or self.max_pixels)
        changed = replace(self, fps=fps or self.fps, min_frames=least, max_frames=most, min_pixels=limits[0], max_pixels=limits[1])
        if not 0 < changed.fps <= 1000 or not self.temporal_patch_size <= most <= MOST_FRAMES:
            message = (
                f"a video would be sampled at {changed.fps} frames a second, up to {most} of them; legal are more than 0 and up to 1000, "
                f"and {self.temporal_patch_size} to {MOST_FRAMES} frames"
            )
            raise RequestError(message, code="invalid_video")
        if not changed.factor**2 <= changed.max_pixels or changed.min_pixels > changed.max_pixels:
            message = (
                f"a video would have {changed.min_pixels} to {changed.max_pixels} pixels; legal is at least {changed.factor**2}, and no "
                "more at least than at most"
            )
            raise RequestError(message, code="invalid_video")
        return changed

    def sampled(self, frames: int, rate: float | None) -> list[int]:
        """Indices of the frames that are taken of a video, ascending.

        Args:
            frames: of the video.
            rate: its frames a second, or None where its file does not say.
        """
        count = int(frames / (rate or UNKNOWN_RATE) * self.fps)
        count = min(max(count, self.min_frames), self.max_frames, frames)
        return [int(index) for index in np.linspace(0, frames - 1, count).round()]

    def resized(self, frames: int, height: int, width: int, param: str | None = None) -> tuple[int, int]:
        """Height and width that the sampled frames of a video are resized to: multiples of `factor`, of about the same ratio.

        Raises:
            RequestError: the frames are too few for one patch, or a side is more than `MOST_RATIO` times the other.
        """
        span, factor = self.temporal_patch_size, self.factor
        if frames < span:
            raise RequestError(f"the video has {frames} frames; legal are {span} or more", param=param, code="invalid_video")
        if min(height, width) < factor:
            grow = max(factor / height, factor / width)
            height, width = int(height * grow), int(width * grow)
        if (ratio := max(height, width) / min(height, width)) > MOST_RATIO:
            message = f"the video has a side of {ratio:.0f} times the other; legal are up to {MOST_RATIO} times"
            raise RequestError(message, param=param, code="invalid_video")
        most = self.max_pixels
        if self.frame_tokens is not None:
            most = frames * max(min(self.frame_tokens * factor**2, most // frames), int(self.min_pixels * 1.05))
        frame_most = self.frame_pixels or most
        most = min(most, frames * frame_most)
        rows, columns = (round(side / factor) * factor for side in (height, width))  # halves to even, as the published function
        area = round(frames / span) * span * rows * columns
        if area > most or rows * columns > frame_most:
            shrink = math.sqrt(frames * height * width / most)
            rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return rows, columns

    def grid(self, frames: int, rate: float | None, height: int, width: int, param: str | None = None) -> tuple[int, int, int]:
        """Patches of a video in time, rows and columns, known before it is decoded; arguments and errors of `sampled` and `resized`."""
        count = len(self.sampled(frames, rate))
        rows, columns = self.resized(count, height, width, param)
        return -(-count // self.temporal_patch_size), rows // self.patch_size, columns // self.patch_size

    def seconds(self, indices: Sequence[int], rate: float | None) -> list[float]:
        """When each pair of sampled frames is seen: the mean of its first and last frame. The last frame is repeated to fill a pair."""
        span = self.temporal_patch_size
        times = [index / (rate or UNKNOWN_RATE) for index in self._filled(indices)]
        return [(first + last) / 2 for first, last in zip(times[::span], times[span - 1 :: span], strict=True)]

    def pairs(
        self, frames: Iterable[torch.Tensor], indices: Sequence[int], rate: float | None, param: str | None = None
    ) -> Iterator[FramePair]:
        """Resizes the sampled frames of a video and cuts them into patches, a pair at a time, so that no more are held.

        Args:
            frames: [3, height, width] u8 each, of one size, as many as `indices`.
            indices: of `sampled`.
            rate: frames a second of the video.
            param: the request field that it came in, for errors.

        Raises:
            RequestError: of `resized`.
        """
        span, given = self.temporal_patch_size, iter(frames)
        first = next(given)
        size = self.resized(len(indices), first.shape[1], first.shape[2], param)
        left, last = chain([first], given), first
        for seconds in self.seconds(indices, rate):
            taken = []
            for _ in range(span):
                last = next(left, last)
                taken.append(last)
            yield FramePair(self.cut(torch.stack(taken), size), seconds)

    def _filled(self, indices: Sequence[int]) -> list[int]:
        """With the last one repeated, as many as fill patches."""
        return [*indices, *[indices[-1]] * (-len(indices) % self.temporal_patch_size)]


PUBLISHED = VideoProcessor(16, 2, 2, (0.5,) * 3, (0.5,) * 3, 1 / 255, 4096, 25_165_824, 2, 4, 768, None)
"""Of Qwen3.5 and 3.6."""


def processor_of(values: Mapping[str, Any], where: str) -> VideoProcessor:
    """The processor that the fields of a file describe.

    Args:
        where: the file's name, for errors.

    Raises:
        ConfigError: naming the field that is missing, malformed, of a value that is not implemented, or that nothing here reads.
    """
    from .processor_files import VideoFile, read_fields

    file = read_fields(VideoFile, values, where)
    if file.min_frames > file.max_frames:
        raise ConfigError(f"{where}: min_frames is {file.min_frames} and max_frames {file.max_frames}; expected a range")
    frame_tokens = file.max_video_tokens if file.cap_pixels_per_frame else None
    sampling: dict[str, Any] = {"fps": file.fps, "min_frames": file.min_frames, "max_frames": file.max_frames}
    return VideoProcessor(**file.common(where), **sampling, frame_tokens=frame_tokens)


def read_video_processor(directory: Path) -> VideoProcessor:
    """The processor of a checkpoint's directory, from whichever of FILES it has.

    Raises:
        ConfigError: it has none, two that disagree, or one that `processor_of` refuses.
    """
    return read_files(directory, FILES, NESTED, processor_of, "videos")
