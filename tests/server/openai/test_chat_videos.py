"""Videos in chats: where their frames stand in the prompt, what counts them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import httpx
import openai
import pytest
from support.chats import ask, prompt_of, refused, text
from support.optional import needs_module
from support.shown import END, IMAGE, START, TURN, VIDEO, VIDEO_ID, VIDEOS, VISION, data_url, reader, showing, url
from support.videos import video

from npucompile.runtime.picture_spans import Span, positions
from npucompile.server.pictures.limits import VideoLimits
from npucompile.server.pictures.video_file import read_video

PLACE = f"{START}{VIDEO * 6}{END}"


@pytest.fixture(scope="module")
def served():
    needs_module("av", "the extra video")
    with reader() as taken, showing(taken=taken) as (address, engine):
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0), engine, address


def film(data: bytes, kind: str = "mp4"):
    return {"type": "video_url", "video_url": {"url": data_url(data, kind, "video")}}


def image(seed=1):
    return {"type": "image_url", "image_url": {"url": url(seed=seed)}}


def test_pairs_of_frames_stand_where_the_video_was_sent_each_behind_its_time(served):
    client, engine, _ = served
    data = video(9)
    answer = ask(client, text("what is "), film(data), text("?"))
    request = engine.requests[-1]
    places = f"<0.4 seconds>{PLACE}<1.6 seconds>{PLACE}"
    assert prompt_of(engine) == f"{TURN}user\nwhat is {places}?<|im_end|>\n{TURN}assistant\n"
    first, second = request.pictures
    assert first.span == Span(request.prompt.index(VIDEO_ID), 2, 3)
    assert request.prompt[second.span.first : second.span.end] == (VIDEO_ID,) * 6
    pairs = read_video(data, VIDEOS)
    assert [each.digest for each in request.pictures] == [pair.picture.digest for pair in pairs]
    assert [each.patches.tobytes() for each in request.pictures] == [pair.picture.pixels.numpy().tobytes() for pair in pairs]
    assert first.patches.shape == (24, 1536)
    assert answer.usage.prompt_tokens_details.image_tokens == 12
    # A pair is a picture of its own for positions, too: times between are text.
    assert positions(len(request.prompt), [each.span for each in request.pictures])[second.span.end, 0] < second.span.end


def test_pictures_and_videos_stand_in_the_order_in_which_they_were_sent(served):
    client, engine, _ = served
    ask(client, image(2), film(video(9)), text("and "), image(3))
    picture = f"{START}{IMAGE * 6}{END}"
    assert f"user\n{picture}<0.4 seconds>{PLACE}<1.6 seconds>{PLACE}and {picture}<|im_end|>" in prompt_of(engine)
    spans = [each.span for each in engine.requests[-1].pictures]
    assert spans == sorted(spans, key=lambda span: span.first)
    assert [each.patches.shape[1] for each in engine.requests[-1].pictures] == [768, 1536, 1536, 768]


def test_marks_that_a_user_types_are_text(served):
    client, engine, _ = served
    ask(client, text(f"{START}{VIDEO}{END} "), film(video(4)), text(VIDEO))
    assert len(engine.requests[-1].pictures) == 2
    assert engine.requests[-1].prompt.count(VIDEO_ID) == 12


def test_what_is_rendered_is_what_is_asked(served):
    client, engine, address = served
    body = {"model": "tiny", "messages": [{"role": "user", "content": [film(video(9)), text("?")]}]}
    rendered = httpx.post(f"{address}/chat/completions/render", json=body)
    ask(client, film(video(9)), text("?"))
    assert tuple(rendered.json()["token_ids"]) == engine.requests[-1].prompt


def test_options_of_the_processor_change_what_is_sampled(served):
    client, engine, _ = served
    ask(client, film(video(12)), text("?"), extra_body={"mm_processor_kwargs": {"fps": 4, "max_frames": 5}})
    assert len(engine.requests[-1].pictures) == 3
    ask(client, film(video(12)), text("?"), extra_body={"mm_processor_kwargs": {"max_pixels": 4096}})
    assert {each.grid for each in engine.requests[-1].pictures} == {(2, 2)}
    error = refused(client, film(video(12)), extra_body={"mm_processor_kwargs": {"max_frames": 1}})
    assert (error.code, error.param) == ("invalid_video", "mm_processor_kwargs")


PARAM = "messages[0].content[0].video_url.url"


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (lambda: film(b"x"), "unsupported_video_media_type"),
        (lambda: film(video(9)[:900]), "video_parse_error"),
        (lambda: film(video(3, "mjpeg", "avi"), "avi"), "unsupported_video_media_type"),
        (lambda: film(video(1)), "invalid_video"),
        (lambda: {"type": "video_url", "video_url": {"url": url()}}, "unsupported_video_media_type"),
        (lambda: {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,BBBB"}}, "invalid_base64_video"),
        (lambda: {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "invalid_video_url"),
        (lambda: {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "invalid_video_url"),
    ],
)
def test_a_video_that_cannot_be_read_is_refused_by_its_part(served, part, code):
    client, engine, _ = served
    before = len(engine.requests)
    error = refused(client, part(), text("?"))
    assert (error.code, error.param) == (code, PARAM)
    assert "0x" not in error.message
    assert len(engine.requests) == before


def test_more_videos_than_are_legal_are_refused(served):
    client, _, _ = served
    error = refused(client, film(video(4)), film(video(5)))
    assert (error.code, error.param) == ("too_many_videos", "messages[0].content[1].video_url.url")
    assert "2 videos in a request; legal are up to 1" in error.message


def test_a_server_without_videos_says_what_would_take_them():
    with reader(vision=replace(VISION, videos="its artifact has none; legal are pictures")) as taken, showing(taken=taken) as (address, _):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        error = refused(client, film(b"x"))
        assert (error.code, error.param) == ("unsupported_value", PARAM)
        assert "is a video, and this server takes none: its artifact has none; legal are pictures" in error.message


def test_a_decoder_refuses_what_is_above_its_limits():
    needs_module("av", "the extra video")
    with reader(videos=VideoLimits(max_frames=8)) as taken, showing(taken=taken) as (address, _):
        error = refused(openai.OpenAI(base_url=address, api_key="none", max_retries=0), film(video(9)))
        assert (error.code, error.param) == ("video_too_large", PARAM)
