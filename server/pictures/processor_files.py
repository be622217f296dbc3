"""The forms of the files that say how a checkpoint's pictures and videos are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...graphs.errors import ConfigError
from .limits import CHANNELS, MOST_FRAMES

_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
_F = TypeVar("_F", bound="PatchFile")
_Count = Annotated[int, Field(ge=1, le=MOST_FRAMES)]
_Channels = Annotated[list[float], Field(min_length=CHANNELS, max_length=CHANNELS)]


class _Sizes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    shortest_edge: _Size
    longest_edge: _Size


class PatchFile(BaseModel):
    """Fields of a processor's file; those with one legal value are ones that change what is computed, and only that is implemented."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    patch_size: _Size
    temporal_patch_size: _Size
    merge_size: _Size
    image_mean: _Channels
    image_std: _Channels
    size: _Sizes | None = None
    # Written in place of `size` before it had fields; transformers prefers them.
    min_pixels: _Size | None = None
    max_pixels: _Size | None = None
    rescale_factor: Annotated[float, Field(gt=0, le=1)] = 1 / 255
    resample: Literal[3] = 3  # bicubic
    do_resize: Literal[True] = True
    do_rescale: Literal[True] = True
    do_normalize: Literal[True] = True
    do_convert_rgb: Literal[True] = True
    data_format: Literal["channels_first"] | None = None
    # Names of classes, and how tensors are batched, which changes no value.
    processor_class: str | None = None
    default_to_square: bool | None = None
    disable_grouping: bool | None = None

    def common(self, where: str) -> dict[str, Any]:
        """Values of the fields of `PatchProcessor`, by name.

        Raises:
            ConfigError: naming the field that is missing or that no picture could be prepared by.
        """
        for name, value in (self.model_extra or {}).items():
            if value and not name.startswith("_"):
                message = f"{name} is {value!r}, and nothing here reads it; legal is a file without the field, or with it off"
                raise ConfigError(f"{where}: {message}")
        size = self.size
        least, most = self.min_pixels or (size and size.shortest_edge), self.max_pixels or (size and size.longest_edge)
        if not least or not most:
            raise ConfigError(f"{where}: size is missing; expected an object with shortest_edge and longest_edge, in pixels of area")
        factor = self.patch_size * self.merge_size
        if not max(least, factor**2) <= most:
            raise ConfigError(f"{where}: size is {least} to {most} pixels; expected a range, up to {factor**2} pixels of a token or more")
        if not all(self.image_std):
            raise ConfigError(f"{where}: image_std is {self.image_std}; expected numbers other than 0")
        statistics = {"image_mean": tuple(self.image_mean), "image_std": tuple(self.image_std), "rescale_factor": self.rescale_factor}
        sides = {name: getattr(self, name) for name in ("patch_size", "temporal_patch_size", "merge_size")}
        return sides | statistics | {"min_pixels": least, "max_pixels": most}


class PictureFile(PatchFile):
    """Of pictures."""

    image_processor_type: Literal["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"]


class VideoFile(PatchFile):
    """Sampling has the defaults of the class, for published files leave it out."""

    video_processor_type: Literal["Qwen3VLVideoProcessor"]
    fps: Annotated[float, Field(gt=0, le=1000)] = 2
    min_frames: _Count = 4
    max_frames: _Count = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: Annotated[int, Field(ge=1, le=2**20)] = 768
    do_sample_frames: Literal[True] = True
    return_metadata: bool | None = None  # of what a call returns, which changes no value


def read_fields(form: type[_F], values: Mapping[str, Any], where: str) -> _F:
    """The fields of a file in their form.

    Raises:
        ConfigError: naming the field that is missing, malformed, or of a value that is not implemented.
    """
    try:
        # A field that is null counts as absent, as for transformers.
        return form.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ConfigError(f"{where}: {name} is missing; expected the field that the checkpoint was published with") from None
        raise ConfigError(f"{where}: {name} is {first['input']!r}; {first['msg']}") from None
