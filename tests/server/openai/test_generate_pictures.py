"""`image_data` of /generate: URLs beside a prompt that has their places."""

from __future__ import annotations

import httpx
import pytest
from support.optional import needs_module
from support.shown import END, IMAGE, IMAGE_ID, PLACE, START, VIDEO, VIDEO_ID, codec, data_url, showing, url
from support.videos import video

SCORED = {"return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def served():
    with showing() as (address, engine):
        yield address.removesuffix("/v1"), engine


def ask(served, **body):
    return httpx.post(f"{served[0]}/generate", json=body, timeout=60)


def test_a_text_has_a_place_for_each_picture(served):
    for image_data in (url(), [url()]):
        answer = ask(served, text=f"a{PLACE}b", image_data=image_data).json()
        request = served[1].requests[-1]
        assert codec().decode(request.prompt, skip_special=False) == f"a{PLACE}b".replace(IMAGE, IMAGE * 6)
        assert [shown.grid for shown in request.pictures] == [(4, 6)]
        assert answer["meta_info"]["prompt_tokens"] == len(request.prompt)


def test_token_ids_have_one_too(served):
    ids = codec().encode(f"a{PLACE}b")
    assert ask(served, input_ids=ids, image_data=[url(32, 64)]).status_code == 200
    assert served[1].requests[-1].prompt == (*ids[:2], IMAGE_ID, IMAGE_ID, *ids[3:])


def test_several_prompts_have_their_own(served):
    texts = [f"{PLACE}a", "b", f"{PLACE}{PLACE}c"]
    answer = ask(served, text=texts, image_data=[url(), None, [url(32, 32), url(32, 64)]])
    assert len(answer.json()) == 3
    shown = {request.id[-1]: [picture.grid for picture in request.pictures] for request in served[1].requests[-3:]}
    assert shown == {"0": [(4, 6)], "1": [], "2": [(2, 2), (2, 4)]}


def test_a_text_has_a_place_for_each_video(served):
    needs_module("av", "the extra video")
    film, mark, frame = data_url(video(9), "mp4", "video"), f"{START}{VIDEO}{END}", f"{START}{VIDEO * 6}{END}"
    frames = f"<0.4 seconds>{frame}<1.6 seconds>{frame}"
    for text in (f"a{PLACE}b{mark}c", f"a{mark}b{PLACE}c"):
        assert ask(served, text=text, image_data=url(), video_data=[film]).status_code == 200
        request = served[1].requests[-1]
        wanted = text.replace(mark, frames).replace(IMAGE, IMAGE * 6)
        assert codec().decode(request.prompt, skip_special=False) == wanted
        assert [request.prompt[shown.span.first] == VIDEO_ID for shown in request.pictures].count(True) == 2
    for body, field in (({"text": "a"}, "text"), ({"input_ids": [1, VIDEO_ID, 2]}, "video_data")):
        error = ask(served, **body, video_data=film).json()["error"]
        assert error["param"] == field
    error = ask(served, text=["a", "b"], video_data=[film]).json()["error"]
    assert (error["param"], "video_data is" in error["message"]) == ("video_data", True)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"text": "a", "image_data": [url()]}, "text", "invalid_image"),
        ({"text": f"{PLACE}{PLACE}a", "image_data": [url()]}, "text", "invalid_image"),
        ({"input_ids": [1, IMAGE_ID, IMAGE_ID, 2], "image_data": url()}, "input_ids", "invalid_image"),
        ({"text": f"a{IMAGE}", "image_data": [url()]}, "text", "invalid_image"),
        ({"text": f"{PLACE}a", "image_data": ["AAAA"]}, "image_data[0]", "invalid_image_url"),
        ({"text": f"{PLACE}a", "image_data": {"url": url()}}, "image_data", "invalid_image_url"),
        ({"text": f"{PLACE}a", "image_data": [url(), 7]}, "image_data[1]", "invalid_image_url"),
        ({"text": ["a", "b"], "image_data": [url()]}, "image_data", None),
        ({"text": f"{PLACE}a", "image_data": [url()], **SCORED}, "logprob_start_len", "unsupported_value"),
    ],
)
def test_what_does_not_agree_is_refused(served, body, param, code):
    answer = ask(served, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert code in (None, error["code"])


def test_scores_begin_behind_the_pictures(served):
    ids = codec().encode(f"a{PLACE}bcd")
    answer = ask(served, input_ids=ids, image_data=[url(32, 32)], return_logprob=True, logprob_start_len=4)
    assert answer.status_code == 200, answer.text
