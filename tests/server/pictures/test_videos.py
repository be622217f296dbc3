"""Preprocessing of videos against transformers' own processor: which frames, when, how large, their pixels bit for bit; and the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import published_videos
from support.published_pictures import digest
from support.published_videos import CAPPED, FIELDS, frames

from npucompile.graphs.errors import ConfigError, RequestError
from npucompile.server.pictures import videos
from npucompile.server.pictures.videos import FramePair, VideoProcessor, processor_of, read_video_processor

PROCESSOR = processor_of(FIELDS, "a file")
BOUNDED = processor_of(FIELDS | CAPPED, "a file")

PUBLISHED = json.loads(published_videos.GOLDEN.read_text(encoding="utf-8"))
SHARE = 20


def pairs_of(processor: VideoProcessor, count: int, rate: float | None, height: int, width: int, seed: int = 0) -> list[FramePair]:
    indices = processor.sampled(count, rate)
    return list(processor.pairs(frames(indices, height, width, seed), indices, rate))


@pytest.mark.short_cases("0", "7")
@pytest.mark.parametrize("first", range(0, len(PUBLISHED), SHARE), ids=lambda first: str(first // SHARE))
def test_frames_texts_and_values_are_those_of_the_published_processor(first: int) -> None:
    assert len(PUBLISHED) == 200
    for (count, rate, height, width, seed, bounded), indices, texts, grid, expected in PUBLISHED[first : first + SHARE]:
        processor = BOUNDED if bounded else PROCESSOR
        name = f"{count} frames of {height}x{width} at {rate}"
        assert processor.sampled(count, rate) == indices, name
        pairs = pairs_of(processor, count, rate, height, width, seed)
        assert [pair.text for pair in pairs] == texts, name
        assert {pair.picture.grid for pair in pairs} == {(1, *grid[1:])}, name
        assert {pair.picture.tokens for pair in pairs} == {grid[1] * grid[2] // 4}, name
        values = torch.cat([processor.normalised(pair.picture.pixels) for pair in pairs])
        assert values.shape == (grid[0] * grid[1] * grid[2], 1536)
        assert digest(values, grid) == expected, name


def test_a_pair_is_a_picture_with_a_digest_of_its_own() -> None:
    pairs = pairs_of(PROCESSOR, 6, 2.0, 64, 96)
    assert [pair.picture.pixels.shape for pair in pairs] == [(24, 1536)] * 3
    assert all(pair.picture.pixels.dtype == torch.uint8 for pair in pairs)
    assert len({pair.picture.digest for pair in pairs}) == 3
    assert [pair.picture.digest for pair in pairs_of(PROCESSOR, 6, 2.0, 64, 96)] == [pair.picture.digest for pair in pairs]


def test_what_no_patch_can_be_made_of_is_refused() -> None:
    with pytest.raises(RequestError, match="the video has 1 frames; legal are 2 or more") as refused:
        pairs_of(PROCESSOR, 1, 25.0, 64, 64)
    assert refused.value.code == "invalid_video"
    with pytest.raises(RequestError, match="a side of 250 times the other; legal are up to 200 times") as refused:
        PROCESSOR.resized(4, 8000, 32, "messages[0].content[1].video_url.url")
    assert refused.value.param == "messages[0].content[1].video_url.url"


@given(st.integers(2, 40), st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=500)
def test_a_frame_is_no_larger_than_its_bound(count: int, height: int, width: int) -> None:
    bounded = replace(PROCESSOR, frame_pixels=64 * 64)
    if max(height, width) > 100 * min(height, width):
        return
    rows, columns = bounded.resized(count, height, width)
    assert rows * columns <= max(64 * 64, 32 * max(rows, columns))
    if rows * columns * count < 4096:
        assert (rows, columns) == PROCESSOR.resized(count, height, width)


def test_options_of_a_request_change_what_is_sampled() -> None:
    assert len(PROCESSOR.with_options(fps=1).sampled(300, 30.0)) == 10
    assert len(PROCESSOR.with_options(max_frames=3).sampled(300, 30.0)) == 3
    smaller = PROCESSOR.with_options(max_pixels=4 * 64 * 64)
    assert (smaller.resized(4, 512, 512), PROCESSOR.resized(4, 512, 512)) == ((64, 64), (512, 512))
    assert PROCESSOR.with_options() == PROCESSOR
    for options in ({"fps": 1001.0}, {"fps": -1.0}, {"fps": float("nan")}, {"max_frames": 1}, {"max_frames": 2**14 + 1}):
        with pytest.raises(RequestError, match="legal are more than 0 and up to 1000, and 2 to 16384 frames"):
            PROCESSOR.with_options(**options)  # type: ignore[arg-type]
    for limits in ({"max_pixels": 1023}, {"min_pixels": 2**30}):
        with pytest.raises(RequestError, match="legal is at least 1024, and no more at least than at most"):
            PROCESSOR.with_options(**limits)


# --- files ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "a file: patch_size is missing"),
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "a file: video_processor_type is 'Qwen2VLVideoProcessor'; Input should be"),
        ({"size": None}, "a file: size is missing"),
        ({"do_sample_frames": False}, "a file: do_sample_frames is False; Input should be True"),
        ({"fps": 0}, "a file: fps is 0; Input should be greater than 0"),
        ({"min_frames": 9, "max_frames": 8}, "a file: min_frames is 9 and max_frames 8; expected a range"),
        ({"num_frames": 32}, "a file: num_frames is 32, and nothing here reads it"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(FIELDS | changes, "a file")


def test_published_files_leave_sampling_to_their_class() -> None:
    assert videos.PUBLISHED == PROCESSOR
    assert (PROCESSOR.fps, PROCESSOR.min_frames, PROCESSOR.max_frames, PROCESSOR.frame_tokens) == (2, 4, 768, None)
    assert (BOUNDED.fps, BOUNDED.max_frames, BOUNDED.frame_tokens) == (5, 16, 12)


def test_both_forms_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"video_preprocessor_config.json nor processor_config.json with video_processor; videos are"):
        read_video_processor(tmp_path)
    # As transformers 5.23 writes it.
    written = {"do_sample_frames": True, "fps": 2, "max_frames": 768, "min_frames": 4, "max_video_tokens": 768, "return_metadata": False}
    nested = {"video_processor": FIELDS | written | {"resample": 3, "rescale_factor": 1 / 255}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_video_processor(tmp_path) == PROCESSOR
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(FIELDS))
    assert read_video_processor(tmp_path) == PROCESSOR
