"""Pictures in chats, as openai-python sends them: bodies, prompts, usage, errors and what is told of them."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import httpx
import openai
import pytest
from support.chats import ask, prompt_of, refused, text
from support.published_pictures import encoded, picture
from support.scripted import scripted
from support.shown import END, FORM, IMAGE, IMAGE_ID, PLACE, SHOWING, START, TURN, VISION, data_url, reader, showing, url
from support.texts import byte_codec

from npucompile.runtime.picture_spans import Span
from npucompile.server.pictures.decoding import decode


@pytest.fixture(scope="module")
def taken():
    with reader() as one:
        yield one


@pytest.fixture(scope="module")
def served(taken):
    with showing(taken=taken) as (address, engine):
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0), engine, address


def image(address, **fields):
    return {"type": "image_url", "image_url": {"url": address, **fields}}


def test_a_picture_stands_in_the_prompt_where_it_was_sent(served):
    client, engine, _ = served
    answer = ask(client, text("what is "), image(url(64, 96), detail="low"), text("?"))
    assert answer.choices[0].message.content == "ok"
    request = engine.requests[-1]
    assert prompt_of(engine) == f"{TURN}user\nwhat is {START}{IMAGE * 6}{END}?<|im_end|>\n{TURN}assistant\n"
    (shown,) = request.pictures
    assert shown.grid == (4, 6)
    assert shown.patches.shape == (24, 768)
    assert shown.patches.dtype == "uint8"
    assert shown.span == Span(request.prompt.index(IMAGE_ID), 2, 3)
    assert request.prompt[shown.span.first : shown.span.end] == (IMAGE_ID,) * 6
    details = answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert (details.image_tokens, details.text_tokens) == (6, len(request.prompt) - 6)


def test_patches_are_those_of_the_processor(served):
    _, engine, _ = served
    source = picture(50, 70, 3, "RGBA")
    ask(served[0], image(data_url(encoded(source))), text("x"))
    expected = VISION.processor.picture(decode(encoded(source)))
    (shown,) = engine.requests[-1].pictures
    assert (shown.patches == expected.pixels.numpy()).all()
    assert shown.digest == expected.digest


def test_several_pictures_of_different_sizes_between_texts_and_turns(served):
    client, engine, _ = served
    first, second = url(32, 64, 1), url(64, 32, 2)
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": [image(first), text("a"), image(second)]},
            {"role": "assistant", "content": "seen"},
            {"role": "user", "content": [text("again: "), image(first)]},
        ],
    )
    one, two, three = engine.requests[-1].pictures
    assert [shown.grid for shown in (one, two, three)] == [(2, 4), (4, 2), (2, 4)]
    # The same picture twice has one digest; one that is turned has another, though it may have the same bytes.
    assert one.digest == three.digest != two.digest
    assert one.span.end <= two.span.first < two.span.end <= three.span.first
    assert all(engine.requests[-1].prompt[shown.span.first] == IMAGE_ID for shown in (one, two, three))


def test_completions_of_a_prompt_and_streams_have_the_pictures(served):
    client, engine, _ = served
    ask(client, image(url()), text("x"), n=3)
    assert [len(request.pictures) for request in engine.requests[-3:]] == [1, 1, 1]
    chunks = list(ask(client, image(url()), text("x"), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == 6


def test_marks_that_a_user_types_are_text(served):
    client, engine, _ = served
    ask(client, text(f"{PLACE} is typed, "), image(url()), text(f"{IMAGE}is too"))
    request = engine.requests[-1]
    assert sum(token == IMAGE_ID for token in request.prompt) == 6
    assert prompt_of(engine) == f"{TURN}user\n{PLACE} is typed, {START}{IMAGE * 6}{END}{IMAGE}is too<|im_end|>\n{TURN}assistant\n"
    (shown,) = request.pictures
    assert request.prompt[shown.span.first : shown.span.end] == (IMAGE_ID,) * 6
    # Neither do they mean anything without a picture, nor in what a model is said to have written.
    said = [("user", IMAGE), ("assistant", PLACE), ("user", "x")]
    client.chat.completions.create(model="tiny", messages=[{"role": role, "content": content} for role, content in said])
    assert IMAGE_ID not in engine.requests[-1].prompt
    assert engine.requests[-1].pictures == ()


def test_results_of_tools_may_be_pictures(served):
    client, engine, _ = served
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [text("seen: "), image(url())]},
        ],
    )
    assert f"tool\nseen: {START}{IMAGE * 6}{END}" in prompt_of(engine)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"size": {"longest_edge": 1}}, "mm_processor_kwargs.size", "unknown_field"),
        ({"max_pixels": "x"}, "mm_processor_kwargs.max_pixels", "invalid_field"),
        ({"max_pixels": 10**6}, "mm_processor_kwargs.max_pixels", "image_too_large"),
        ({"max_pixels": 100}, "mm_processor_kwargs", "invalid_image"),
        ({"min_pixels": 65000, "max_pixels": 2000}, "mm_processor_kwargs", "invalid_image"),
    ],
)
def test_other_options_of_the_processor_are_refused_by_name(served, given, param, code):
    error = refused(served[0], image(url()), text("x"), extra_body={"mm_processor_kwargs": given})
    assert (error.param, error.code) == (param, code)


WHERE = "messages[0].content[1].image_url.url"
PNG = encoded(picture(64, 96, 1))


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("file:///etc/passwd", "invalid_image_url"),
        ("https://example.com/a.png", "invalid_image_url"),
        ("data:image/png,abc", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:video/jpeg;base64,AAAA", "unsupported_image_media_type"),
        ("data:image/png;base64,", "empty_image_file"),
        ("data:image/png;base64,A", "invalid_base64_image"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "unsupported_image_media_type"),
        (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "unsupported_image_media_type"),
        (data_url(b"8BPS\0\1" + bytes(60)), "unsupported_image_media_type"),
        (data_url(PNG[:100]), "image_parse_error"),
        (url(2, 1000), "invalid_image"),
        (url(32, 32 * 200), "image_too_large"),
    ],
)
def test_what_is_no_legal_picture_is_refused_with_openais_codes_and_the_place(served, address, code):
    error = refused(served[0], text("x"), image(address))
    assert (error.param, error.code) == (WHERE, code)
    for leak in (" 0x", "PIL", "BytesIO", "Traceback", "passwd" if "passwd" not in address else "\0"):
        assert leak not in error.message


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": url()}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 1}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "most"}}, "messages[0].content[0].image_url.detail"),
        ({"type": "image_url", "image_url": {"url": "data:", "content_hash": "x"}}, "messages[0].content[0].image_url.content_hash"),
        ({"type": "image_url", "image_url": {"url": "data:"}, "uid": "x"}, "messages[0].content[0].uid"),
        ({"type": "file", "file": {"file_id": "x"}}, "messages[0].content[0].file"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].input_audio"),
        ({"type": "image_embeds", "image_embeds": "x"}, "messages[0].content[0].image_embeds"),
    ],
)
def test_parts_of_another_form_are_refused_by_their_names(served, part, param):
    error = refused(served[0], part)
    assert error.param in (param, "messages[0].content[0].type")


def test_pictures_of_the_assistant_and_of_the_system_are_refused(served):
    client = served[0]
    for role, code in (("assistant", None), ("system", "chat_template_error")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}, {"role": role, "content": [image(url()), text("x")]}]
            )
        assert code in (None, caught.value.code)
        assert caught.value.param == ("messages" if code else "messages[1].content[0]")


def test_too_many_pictures_are_refused_at_the_first_that_is(served, taken):
    most = taken.limits.images
    error = refused(served[0], *[image(url()) for _ in range(most + 1)], text("x"))
    assert (error.code, error.param) == ("too_many_images", f"messages[0].content[{most}].image_url.url")
    ask(served[0], *[image(url()) for _ in range(most)], text("x"))
    assert len(served[1].requests[-1].pictures) == most


def test_a_server_of_text_says_what_would_take_pictures():
    with scripted(chat=FORM) as (address, _):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        error = refused(client, text("x"), image(url()))
        assert (error.code, error.param) == ("unsupported_value", WHERE)
        assert "--encode" in error.message
        # And a template gets its parts as one text, as before.
        ask(client, text("a"), text("b"))


def test_scores_of_the_prompt_begin_behind_its_pictures(served):
    error = refused(served[0], image(url()), text("x"), extra_body={"prompt_logprobs": 0})
    assert (error.code, error.param) == ("unsupported_value", "prompt_logprobs")


def test_a_prompt_that_does_not_fit_is_refused_before_a_pixel_is_decoded(served, taken):
    before = taken.pool.decoded
    with showing(taken=taken, model=replace(SHOWING, max_model_len=40)) as (address, _):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        error = refused(client, image(url(256, 256, seed=9)), text("x"))
    assert error.code == "context_length_exceeded"
    assert taken.pool.decoded == before


def test_tokens_are_counted_without_decoding(served, taken):
    _, engine, address = served
    base, before, asked = address.removesuffix("/v1"), taken.pool.decoded, len(engine.requests)
    body = {"messages": [{"role": "user", "content": [image(url(256, 192, seed=7)), text("x")]}]}
    one = httpx.post(f"{base}/tokenize", json=body).json()
    two = httpx.post(f"{address}/chat/completions/render", json={"model": "tiny", **body}).json()["token_ids"]
    assert one["tokens"] == two
    assert sum(token == IMAGE_ID for token in two) == 48
    assert (taken.pool.decoded, len(engine.requests)) == (before, asked)
    assert byte_codec().encode("x")[0] in two


def test_a_large_body_of_pictures_is_taken_and_a_larger_one_refused(served, taken):
    _, _, address = served
    noise = encoded(picture(1400, 1400, 5).rotate(30).resize((1300, 1300)), "BMP")
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image(data_url(noise, "bmp")), text("x")]}]}
    assert len(json.dumps(body)) > 4 * 2**20
    assert httpx.post(f"{address}/chat/completions", json=body, timeout=60).status_code == 200
    error = refused(served[0], text("x"), image("data:image/png;base64," + base64.b64encode(bytes(20 * 2**20 + 3)).decode()))
    assert (error.code, error.param) == ("image_file_too_large", WHERE)


def test_what_decoding_took_is_in_the_metrics(served, taken):
    client, _, address = served
    own = image(url(64, 64, seed=77))
    for _ in range(2):
        ask(client, own, text("x"))
    refused(client, image("data:image/png;base64,AAAA"), text("x"))
    page = httpx.get(f"{address.removesuffix('/v1')}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("npucompile:picture_decode"))
    results = {
        result: float(samples[f'npucompile:picture_decodes_total{{result="{result}"}}']) for result in ("decoded", "refused", "killed")
    }
    assert results == taken.pool.stats()["picture_decodes"]
    assert min(results["decoded"], results["refused"]) >= 1
    assert float(samples["npucompile:picture_decode_hits_total"]) >= 1
    assert float(samples["npucompile:picture_decode_seconds_total"]) > 0
