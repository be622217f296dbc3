"""Videos of every legal format are decoded to their frames; what is not, and what is too much, is refused before it costs."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import published_pictures
from support.optional import needs_module
from support.published_videos import FIELDS
from support.videos import frame, shade, turned, video

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.pictures import video_file
from npucompile.server.pictures.limits import VideoLimits
from npucompile.server.pictures.video_file import VideoHeader, read_header, read_video
from npucompile.server.pictures.videos import processor_of

PROCESSOR = processor_of(FIELDS, "a file")


@pytest.fixture(autouse=True)
def decoder(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        needs_module("av", "the extra video")


def shades(data: bytes, **limits: Any) -> list[int]:
    """Grays of the sampled frames, from the middle of each pair's first patch below the corner."""
    found = []
    for pair in read_video(data, PROCESSOR, VideoLimits(**limits)):
        pixels = pair.picture.pixels.view(-1, 3, 2, 256)[-1]
        found += [round(float(value)) for value in pixels.float().mean((0, 2))]
    return found


FORMATS = [
    ("libx264", "mp4"),
    ("libx264", "mov"),
    ("libx264", "matroska"),
    ("libx265", "mp4"),
    ("mpeg4", "mp4"),
    ("mpeg4", "avi"),
    ("libvpx", "webm"),
    ("libvpx-vp9", "webm"),
    ("libsvtav1", "mp4"),
]


@pytest.mark.parametrize(("codec", "form"), FORMATS, ids=lambda name: name)
def test_frames_of_legal_formats_are_those_that_were_written(codec: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVT_LOG", "0")
    data = video(9, codec, form, rate=4)
    pairs = read_video(data, PROCESSOR)
    # Nine frames at four a second are two seconds: four frames.
    assert PROCESSOR.sampled(9, 4.0) == [0, 3, 5, 8]
    assert [pair.text for pair in pairs] == ["<0.4 seconds>", "<1.6 seconds>"]
    assert {pair.picture.grid for pair in pairs} == {(1, 4, 6)}
    assert np.abs(np.subtract(shades(data), [shade(index) for index in (0, 3, 5, 8)])).max() <= 6


def test_a_telephone_s_video_is_turned_upright() -> None:
    data = video(4)
    upright, lying = (read_video(each, PROCESSOR)[0].picture for each in (turned(data), data))
    assert (lying.grid, upright.grid) == ((1, 4, 6), (1, 6, 4))
    red = lambda picture, patch: float(picture.pixels.view(-1, 3, 2, 256)[patch, 0].float().mean())  # noqa: E731
    # The corner goes from the upper left to the upper right: the second patch of the first row's last block.
    assert red(lying, 0) > 240 > red(upright, 0)
    assert red(upright, 5) > 240


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_a_file_that_counts_frames_that_it_does_not_show_is_sampled_by_those_it_does(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = video(9, "libx264" if form == "mp4" else "libvpx", form, rate=4)
    whole = read_video(data, PROCESSOR)
    reader = video_file._Reader.__init__

    def counting_more(self: Any, *args: Any) -> None:
        reader(self, *args)
        self.header = replace(self.header, frames=self.header.frames + 3)

    monkeypatch.setattr(video_file._Reader, "__init__", counting_more)
    assert [pair.picture.digest for pair in read_video(data, PROCESSOR)] == [pair.picture.digest for pair in whole]


def test_a_header_says_what_will_be_sampled() -> None:
    for data in (video(9), video(9, "libvpx", "webm"), turned(video(9))):
        header = read_header(data)
        assert header == VideoHeader(9, 4.0, 64, 96)
        grid = PROCESSOR.grid(header.frames, header.rate, header.height, header.width)
        pairs = read_video(data, PROCESSOR)
        assert grid == (len(pairs), 4, 6)
        assert {pair.picture.tokens for pair in pairs} == {6}


# --- what is refused ---


def refusal(data: bytes, **limits: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        read_video(data, PROCESSOR, VideoLimits(**limits), "messages[0].content[1].video_url.url")
    assert refused.value.param == "messages[0].content[1].video_url.url"
    return refused.value


def test_formats_that_are_not_read_are_refused_by_what_is() -> None:
    picture = published_pictures.encoded(published_pictures.picture(32, 32, 1))
    others = [picture, b"GIF89a" + bytes(99), b"%!PS-Adobe", b"#EXTM3U\nhttp://localhost/", video(3, form="mpegts"), b"\0"]
    for data in [*others, video(3, "mjpeg", "avi"), video(3, "jpeg2000", "matroska"), video(3, "ffv1", "matroska")]:
        error = refusal(data)
        assert error.code == "unsupported_video_media_type"
        assert "legal are MP4, MOV, WebM, Matroska and AVI with frames of h264, hevc, vp8, vp9, av1, mpeg4" in str(error)
    assert refusal(b"").code == "empty_video_file"


def test_limits_are_said_with_what_was_found() -> None:
    data = video(9)
    error = refusal(data, max_bytes=100)
    assert (error.code, str(error)) == ("video_file_too_large", f"the video has {len(data)} bytes; legal are up to 100")
    error = refusal(data, max_pixels=64 * 96 - 1)
    assert (error.code, str(error)) == ("video_too_large", "the video has frames of 96x64 pixels; legal are up to 6143")
    for limited in (data, video(9, "libvpx", "webm")):
        error = refusal(limited, max_frames=8)
        assert (error.code, str(error)) == ("video_too_large", "the video has 9 frames or more; legal are up to 8")
    error = refusal(data, max_seconds=1e-9)
    assert (error.code, str(error)) == (
        "video_too_large",
        "decoding the video takes more than 1e-09 seconds; legal is a shorter or a smaller one",
    )
    assert len(read_video(data, PROCESSOR, VideoLimits(max_bytes=len(data), max_pixels=64 * 96, max_frames=9))) == 2
    for name, value in (("max_bytes", 0), ("max_pixels", 2**27), ("max_frames", 2**21), ("max_seconds", 4000)):
        with pytest.raises(SpecError, match=f"{name} of a video is {value}"):
            VideoLimits(**{name: value})  # type: ignore[arg-type]


def test_a_frame_larger_than_the_header_says_is_not_decoded() -> None:
    small, large = video(3), video(3, frames=[frame(index, 1024, 1280) for index in range(3)])
    # Headers of a small video before the frames of a large one, whose own sizes stand in its H.264 stream.
    header = b"".join(side.to_bytes(2, "big") for side in (1280, 1024))
    lying = large.replace(header, b"".join(side.to_bytes(2, "big") for side in (96, 64)))
    assert lying != large
    assert read_video(small, PROCESSOR, VideoLimits(max_pixels=64 * 96))
    assert refusal(lying, max_pixels=64 * 96).code in ("video_too_large", "video_parse_error")


def test_damaged_files_are_refused_without_a_word_of_the_decoder(capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(36)
    whole = [video(6), video(6, "libvpx", "webm"), video(6, "mpeg4", "avi")]
    errors = []
    for data in whole:
        for _ in range(60):
            broken = bytearray(data)
            for _ in range(draw.randint(1, 40)):
                broken[draw.randrange(len(broken))] = draw.randrange(256)
            cut = bytes(broken[: draw.randrange(len(broken))] if draw.random() < 0.3 else broken)
            try:
                read_video(cut, PROCESSOR)
            except RequestError as error:
                errors.append(error)
    assert "video_parse_error" in {error.code for error in errors}
    assert all(str(error).startswith("the video ") and "0x" not in str(error) for error in errors)
    assert capfd.readouterr() == ("", "")


def test_without_a_decoder_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    error = refusal(b"\0\0\0\x1cftypisom" + bytes(40))
    assert error.code == "unsupported_video_media_type"
    assert "this server reads no videos, for PyAV is not installed (the extra video); legal are pictures and text" in str(error)


def test_values_are_those_of_the_frames_that_the_decoder_gives() -> None:
    """PyAV's own frames, cut by the processor, without the reader."""
    import io

    import av

    data = video(9, rate=4)
    with av.open(io.BytesIO(data)) as container:
        frames = [torch.from_numpy(each.to_ndarray(format="rgb24")).permute(2, 0, 1) for each in container.decode(video=0)]
    indices = PROCESSOR.sampled(9, 4.0)
    expected = PROCESSOR.pairs((frames[index] for index in indices), indices, 4.0)
    assert [pair.picture.digest for pair in read_video(data, PROCESSOR)] == [pair.picture.digest for pair in expected]
