"""Preprocessing of pictures as the published processor of Qwen's vision towers does it, bit for bit (docs/decisions/069).

Source of the rules: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, which the checkpoints name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...graphs.errors import ConfigError, RequestError
from .limits import CHANNELS

FILES = ("preprocessor_config.json", "processor_config.json")
NESTED = "image_processor"
"""Field of the second file that holds what the first one is."""

MOST_RATIO = 200
"""Of a picture's longer side to its shorter one."""

_DIGEST_VERSION = b"npucompile picture 1"

_P = TypeVar("_P", bound="PatchProcessor")


@dataclass(frozen=True)
class Picture:
    """A picture, or the frames of a video that one patch spans, resized and cut into patches.

    Attributes:
        pixels: [N, 3 F P P] u8, a row a patch, by channel, frame (one of a picture), row and column in it. Patches are in blocks of
            merge x merge: by block row, block column, row in the block, column in the block.
        grid: patches in time (1), rows and columns; their product is N.
        merge: side of a block, which is one token of the language model.
    """

    pixels: torch.Tensor
    grid: tuple[int, int, int]
    merge: int

    @property
    def tokens(self) -> int:
        """Tokens of the language model that it takes the places of."""
        return len(self.pixels) // self.merge**2

    @property
    def size_bytes(self) -> int:
        """Of the patches."""
        return self.pixels.numel()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the pixels and of their shape: the bytes alone are the same for pictures of 30x100 and 100x30 (CVE-2025-46722)."""
        shape = json.dumps([self.grid, self.merge, list(self.pixels.shape)]).encode()
        made = hashlib.sha256(b"%s %s " % (_DIGEST_VERSION, shape))
        made.update(self.pixels.contiguous().numpy().data)
        return made.digest()


@dataclass(frozen=True)
class PatchProcessor:
    """What a checkpoint's file says of preprocessing, of pictures or of videos; names are the file's.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames of a patch; a picture is repeated as often.
        merge_size: patches of a token are a square of this side.
        image_mean, image_std: of the channels of values that `rescale_factor` was multiplied with.
        min_pixels, max_pixels: area of a resized picture, or of all frames of a video together.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Sides of resized pictures are multiples of it."""
        return self.patch_size * self.merge_size

    def cut(self, frames: torch.Tensor, size: tuple[int, int]) -> Picture:
        """Resizes frames, or a picture as the only one, and cuts them into patches.

        Args:
            frames: [F, 3, height, width] u8.
            size: height and width to resize to, multiples of `factor`.
        """
        if size != tuple(frames.shape[2:]):
            frames = torch.nn.functional.interpolate(frames, size=size, mode="bicubic", antialias=True, align_corners=False)
        side, merge = self.patch_size, self.merge_size
        grid = (1, size[0] // side, size[1] // side)
        blocks = frames.reshape(-1, CHANNELS, grid[1] // merge, merge, side, grid[2] // merge, merge, side)
        return Picture(blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, CHANNELS * len(frames) * side * side), grid, merge)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Patches as a tower reads them.

        Args:
            pixels: [N, 3 F P P] u8 of `Picture`.

        Returns:
            [N, 3 T P P] f32: by channel, frame, row and column; all T frames hold the same picture where F is 1.
        """
        mean, std = (torch.tensor(each) * (1.0 / self.rescale_factor) for each in (self.image_mean, self.image_std))
        values = pixels.view(len(pixels), CHANNELS, -1, self.patch_size**2).float()
        values = values.sub_(mean[:, None, None]).div_(std[:, None, None])
        return values.expand(-1, -1, self.temporal_patch_size, -1).reshape(len(pixels), -1)


@dataclass(frozen=True)
class PictureProcessor(PatchProcessor):
    """The processor of pictures."""

    def with_limits(self, min_pixels: int | None = None, max_pixels: int | None = None) -> PictureProcessor:
        """The same with other limits on the area, of a request or of a server.

        Raises:
            RequestError: no side of a legal picture would fit between them.
        """
        changed = replace(self, min_pixels=min_pixels or self.min_pixels, max_pixels=max_pixels or self.max_pixels)
        least = changed.factor**2
        if not least <= changed.max_pixels or changed.min_pixels > changed.max_pixels:
            message = (
                f"pictures would have {changed.min_pixels} to {changed.max_pixels} pixels; legal is at least {least}, and no more at "
                "least than at most"
            )
            raise RequestError(message, code="invalid_image")
        return changed

    def resized(self, height: int, width: int, param: str | None = None) -> tuple[int, int]:
        """Height and width that a picture is resized to: multiples of `factor`, of about the same ratio, with an area within the limits.

        Raises:
            RequestError: the longer side is more than `MOST_RATIO` times the shorter.
        """
        if (ratio := max(height, width) / min(height, width)) > MOST_RATIO:
            message = f"the picture is {width}x{height}, one side {ratio:.0f} times the other; legal are up to {MOST_RATIO} times"
            raise RequestError(message, param=param, code="invalid_image")
        factor = self.factor
        rows, columns = (round(side / factor) * factor for side in (height, width))  # halves to even, as the published function
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return rows, columns

    def grid(self, height: int, width: int, param: str | None = None) -> tuple[int, int, int]:
        """Patches of a picture in time, rows and columns, known before it is decoded; raises what `resized` does."""
        rows, columns = self.resized(height, width, param)
        return 1, rows // self.patch_size, columns // self.patch_size

    def picture(self, rgb: torch.Tensor, param: str | None = None) -> Picture:
        """Resizes a picture and cuts it into patches.

        Args:
            rgb: [3, height, width] u8 (`decoding.decode`).
            param: the request field that it came in, for errors.

        Raises:
            RequestError: of `resized`.
        """
        _, height, width = rgb.shape
        return self.cut(rgb[None], self.resized(height, width, param))


PUBLISHED = PictureProcessor(16, 2, 2, (0.5,) * CHANNELS, (0.5,) * CHANNELS, 1 / 255, 65_536, 16_777_216)
"""Of Qwen3.5 and 3.6."""


def processor_of(values: Mapping[str, Any], where: str) -> PictureProcessor:
    """The processor that the fields of a file describe. A class's own defaults are those of older models, so that none is taken.

    Args:
        where: the file's name, for errors.

    Raises:
        ConfigError: naming the field that is missing, malformed, of a value that is not implemented, or that nothing here reads.
    """
    # Here, because what builds and generates without pictures needs no validator.
    from .processor_files import PictureFile, read_fields

    return PictureProcessor(**read_fields(PictureFile, values, where).common(where))


def read_processor(directory: Path) -> PictureProcessor:
    """The processor of a checkpoint's directory, from whichever of FILES it has.

    Raises:
        ConfigError: it has none, two that disagree, or one that `processor_of` refuses.
    """
    return read_files(directory, FILES, NESTED, processor_of, "pictures")


def read_files(directory: Path, files: tuple[str, str], nested: str, read: Callable[[Mapping[str, Any], str], _P], what: str) -> _P:
    """What a checkpoint's directory says of preprocessing.

    Args:
        files: a file with the fields, and one that has them in an object of the name `nested`.
        read: makes a processor of the fields and of the file's name.
        what: is prepared by it, for errors.

    Raises:
        ConfigError: it has neither, two that disagree, or one that `read` refuses.
    """
    found = {path: read(values, str(path)) for path, values in _fields_of(directory, files, nested).items()}
    if not found:
        raise ConfigError(f"{directory}: has neither {files[0]} nor {files[1]} with {nested}; {what} are prepared as it says")
    (path, processor), *others = found.items()
    for other, differing in others:
        if differing != processor:
            raise ConfigError(f"{path} and {other} describe different processors: {processor} and {differing}; expected one, or equal ones")
    return processor


def has_files(directory: Path, files: tuple[str, str], nested: str) -> bool:
    """Whether a checkpoint's directory says anything of what `read_files` reads; arguments and errors are its."""
    return bool(_fields_of(directory, files, nested))


def _fields_of(directory: Path, files: tuple[str, str], nested: str) -> dict[Path, dict[str, Any]]:
    found: dict[Path, dict[str, Any]] = {}
    for name in files:
        path = directory / name
        values = _read_json(path) if path.is_file() else None
        if values is not None and name == files[1]:
            values = values.get(nested)
        if isinstance(values, dict):
            found[path] = values
    return found


def _read_json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
