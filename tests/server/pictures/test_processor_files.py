"""Fields of processors' files: what cannot be served is named, and what changes nothing is taken."""

from __future__ import annotations

from typing import Any

import pytest
from support.published_pictures import FIELDS

from npucompile.graphs.errors import ConfigError
from npucompile.server.pictures.processor import processor_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "a file: patch_size is missing"),
        ({"image_mean": None}, "a file: image_mean is missing"),
        ({"size": None}, "a file: size is missing; expected an object with shortest_edge and longest_edge"),
        ({"size": {"height": 224, "width": 224}}, "a file: size.shortest_edge is missing"),
        ({"size": {"shortest_edge": 65536, "longest_edge": 65536, "height": 1}}, "a file: size.height is 1; Extra"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 1023}}, "a file: size is 4096 to 1023 pixels; expected a range, up to 1024"),
        ({"patch_size": "16"}, "a file: patch_size is '16'; Input should be a valid integer"),
        ({"patch_size": True}, "a file: patch_size is True"),
        ({"image_std": [0.5, 0.5]}, r"a file: image_std is \[0.5, 0.5\]"),
        ({"image_std": [0.5, 0.5, 0]}, r"a file: image_std is \[0.5, 0.5, 0.0\]; expected numbers other than 0"),
        ({"image_mean": [float("nan"), 0.5, 0.5]}, r"a file: image_mean.0 is nan"),
        ({"do_resize": False}, "a file: do_resize is False; Input should be True"),
        ({"resample": 2}, "a file: resample is 2; Input should be 3"),
        ({"image_processor_type": "CLIPImageProcessor"}, "a file: image_processor_type is 'CLIPImageProcessor'; Input should be"),
        ({"do_center_crop": True}, "a file: do_center_crop is True, and nothing here reads it"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(FIELDS | changes, "a file")


def test_fields_that_change_nothing_are_taken() -> None:
    more = {"do_center_crop": False, "rescale_factor": 1 / 255, "resample": 3, "do_convert_rgb": True, "default_to_square": False}
    assert processor_of(FIELDS | more | {"_comment": "x"}, "a file") == processor_of(FIELDS, "a file")


def test_older_files_name_the_limits_apart() -> None:
    older = {name: value for name, value in FIELDS.items() if name != "size"} | {"min_pixels": 4096, "max_pixels": 2**20}
    assert (processor_of(older, "a file").min_pixels, processor_of(older, "a file").max_pixels) == (4096, 2**20)
