"""tools/serve/vision.py: what a manifest says of pictures."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from support.shown import IDS, IMAGE, IMAGE_ID, MARKS, VIDEO_ID, VIDEOS, VISION, artifact, codec, reader
from support.texts import byte_codec

from npucompile.server.pictures.limits import MediaLimits, RequestLimits
from npucompile.tools.serve.vision import reader_of, said_of_pictures, vision_of


def test_the_largest_bucket_bounds_pictures():
    vision = vision_of(artifact(), codec())
    assert (vision.image, vision.image_token_id, vision.max_patches) == (IMAGE, IMAGE_ID, 256)
    assert set(vision.marks) == set(MARKS)
    assert vision.processor == VISION.processor
    assert vision_of(artifact((64,)), codec()).processor.max_pixels == 64 * 256


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (artifact(tower=False), {}, "--encode LIST"),
        (artifact(()), {}, "--encode LIST"),
        (artifact(), {"media": MediaLimits(text_alone=True)}, "--language-model-only"),
        (artifact(), {"paired": True}, "--role both"),
        (artifact(ids=IDS | {"image_token_id": 999}), {}, "whose tokenizer has the tokens"),
    ],
)
def test_where_text_alone_is_taken_it_is_said_why(made, options, said):
    why = vision_of(made, codec(), **options)
    assert isinstance(why, str)
    assert said in why


def test_videos_are_taken_where_the_artifact_has_their_processor_and_a_decoder_is_here(monkeypatch):
    assert "built without the checkpoint's video_preprocessor_config.json" in vision_of(artifact(), codec()).videos
    filmed = artifact((64,), videos=asdict(replace(VIDEOS, frame_pixels=None)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    vision = vision_of(filmed, codec())
    assert vision.videos == replace(VIDEOS, frame_pixels=64 * 256)
    assert vision.video_token_id == VIDEO_ID
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "PyAV is not installed (npucompile[video])" in vision_of(filmed, codec()).videos


def test_a_tokenizer_without_the_marks_takes_text_alone():
    assert isinstance(vision_of(artifact(), byte_codec()), str)


def test_what_is_taken_is_said():
    with reader() as taken:
        service = SimpleNamespace(pictures=taken)
        assert said_of_pictures(service)[0].startswith(f"takes {taken.limits.images} pictures")
        assert "65536 pixels" in said_of_pictures(service)[0]
    assert said_of_pictures(SimpleNamespace(pictures=None)) == []


def test_a_reader_has_the_limits():
    one = reader_of(VISION, MediaLimits(request=RequestLimits(3)))
    try:
        assert one.limits.images == 3
        assert len(one.pool.process_ids) == 2
    finally:
        one.close()
    assert not one.pool.process_ids
