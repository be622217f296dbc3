"""Preprocessing against transformers' own processor: sizes, pixels bit for bit, and the files that it is read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import published_pictures
from support.published_pictures import FIELDS, digest, encoded, picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from npucompile.graphs.errors import ConfigError, RequestError
from npucompile.server.pictures.decoding import decode
from npucompile.server.pictures.processor import PictureProcessor, processor_of, read_processor

PROCESSOR = processor_of(FIELDS, "a file")

SIZES = [
    ((448, 448), (448, 448), 196),
    ((1024, 1024), (1024, 1024), 1024),
    ((2160, 3840), (2176, 3840), 8160),
    ((3000, 4000), (3008, 4000), 11750),
    ((4320, 7680), (3072, 5440), 16320),
    ((1, 1), (256, 256), 64),
    ((80, 80), (256, 256), 64),
    ((144, 144), (256, 256), 64),
    ((31, 33), (256, 288), 72),
    ((1, 200), (32, 3648), 114),
    ((10, 1999), (32, 3648), 114),
]


@pytest.mark.parametrize(("size", "resized", "tokens"), SIZES)
def test_sizes_are_those_of_the_published_function(size: tuple[int, int], resized: tuple[int, int], tokens: int) -> None:
    assert PROCESSOR.resized(*size) == resized
    rows, columns = PROCESSOR.grid(*size)[1:]
    assert (rows * 16, columns * 16) == resized
    assert rows * columns // 4 == tokens


def test_two_pictures_of_equal_area_have_other_grids() -> None:
    assert PROCESSOR.grid(30, 150) == PROCESSOR.grid(150, 30)[::2] + PROCESSOR.grid(150, 30)[1:2]
    assert PROCESSOR.grid(30, 150) != PROCESSOR.grid(150, 30)


@given(st.integers(1, 9000), st.integers(1, 9000))
@settings(max_examples=2000)
def test_any_size_is_that_of_transformers(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match="legal are up to 200 times"):
            PROCESSOR.resized(height, width)
    else:
        assert PROCESSOR.resized(height, width) == smart_resize(height, width, 32, 65536, 16777216)


def test_a_long_strip_is_refused_by_its_ratio() -> None:
    with pytest.raises(RequestError, match=r"10000x1, one side 10000 times the other; legal are up to 200") as refused:
        PROCESSOR.resized(1, 10000, "messages[0].content[1].image_url.url")
    assert (refused.value.code, refused.value.param) == ("invalid_image", "messages[0].content[1].image_url.url")


def values_of(rgb: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    prepared = PROCESSOR.picture(rgb)
    assert prepared.tokens * 4 == len(prepared.pixels)
    return PROCESSOR.normalised(prepared.pixels), prepared.grid


PUBLISHED = json.loads(published_pictures.GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.short_cases("0", "7", "14")
@pytest.mark.parametrize("share", range(len(PUBLISHED)), ids=str)
def test_values_are_those_of_the_published_processor(share: int) -> None:
    """The first share has the vectors of sizes."""
    assert sum(map(len, PUBLISHED)) == len(published_pictures.cases()) == 500
    cases = published_pictures.cases()[published_pictures.SHARE * share :]
    for (height, width, seed, mode), expected in zip(cases, PUBLISHED[share], strict=False):
        values, grid = values_of(decode(encoded(picture(height, width, seed, mode))))
        assert values.shape == (grid[1] * grid[2], 1536)
        assert digest(values, list(grid)) == expected, f"a picture of {height}x{width} in mode {mode}"


def test_other_statistics_are_applied_by_channel() -> None:
    fields = FIELDS | {"image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 1.0, 0.25]}
    values = processor_of(fields, "a file").normalised(torch.full((1, 768), 255, dtype=torch.uint8)).view(3, 2, 256)
    torch.testing.assert_close(values, torch.tensor([1.0, 0.75, 4.0])[:, None, None].expand(3, 2, 256), rtol=1e-6, atol=0)


def test_a_digest_tells_pictures_apart_whose_bytes_are_the_same() -> None:
    flat = torch.full((3, 320, 512), 7, dtype=torch.uint8)
    wide, high, other = (PROCESSOR.picture(rgb) for rgb in (flat, flat.transpose(1, 2).contiguous(), flat + 1))
    assert wide.pixels.numpy().tobytes() == high.pixels.numpy().tobytes()
    assert len({wide.digest, high.digest, other.digest}) == 3
    assert PROCESSOR.picture(flat.clone()).digest == wide.digest


def test_limits_of_a_request_change_the_grid_and_the_digest() -> None:
    rgb = decode(encoded(picture(1024, 1024, 1)))
    smaller = PROCESSOR.with_limits(max_pixels=512 * 512)
    assert (smaller.grid(1024, 1024), PROCESSOR.grid(1024, 1024)) == ((1, 32, 32), (1, 64, 64))
    assert smaller.picture(rgb).digest != PROCESSOR.picture(rgb).digest
    for limits in ({"max_pixels": 1023}, {"min_pixels": 2**30}):
        with pytest.raises(RequestError, match="legal is at least 1024, and no more at least than at most"):
            PROCESSOR.with_limits(**limits)


# --- files ---


def write(directory: Path, name: str, values: Any) -> None:
    (directory / name).write_text(json.dumps(values))


def test_both_forms_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has neither preprocessor_config.json nor processor_config.json with image_processor"):
        read_processor(tmp_path)
    write(tmp_path, "processor_config.json", {"processor_class": "Qwen3VLProcessor", "image_processor": FIELDS})
    assert read_processor(tmp_path) == PROCESSOR
    write(tmp_path, "preprocessor_config.json", FIELDS)
    assert read_processor(tmp_path) == PROCESSOR
    write(tmp_path, "preprocessor_config.json", FIELDS | {"merge_size": 1})
    with pytest.raises(ConfigError, match=r"preprocessor_config.json and .*processor_config.json describe different processors"):
        read_processor(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "\ud800"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"preprocessor_config.json: (holds a JSON list|not readable as JSON)"):
        read_processor(tmp_path)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    kept = {name: value for name, value in FIELDS.items() if name not in ("image_processor_type", "processor_class")}
    Qwen2VLImageProcessorPil(**kept).save_pretrained(tmp_path)
    assert isinstance(read_processor(tmp_path), PictureProcessor)
    assert read_processor(tmp_path) == PROCESSOR
