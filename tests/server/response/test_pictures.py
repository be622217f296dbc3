"""Pictures in responses, over HTTP and on websockets, and in conversations that go on."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.shown import END, IMAGE, IMAGE_ID, START, codec, reader, showing, url

from npucompile.server.client import Client


@pytest.fixture(scope="module")
def taken():
    with reader() as one:
        yield one


@pytest.fixture(scope="module")
def served(taken):
    with showing(taken=taken) as (address, engine):
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0), engine, address


def image(address, **fields):
    return {"type": "input_image", "image_url": address, **fields}


def text(value):
    return {"type": "input_text", "text": value}


def user(*content):
    return {"role": "user", "content": list(content)}


def prompt_of(engine):
    return codec().decode(engine.requests[-1].prompt, skip_special=False)


def test_a_conversation_keeps_its_pictures(served):
    client, engine, _ = served
    first = client.responses.create(model="tiny", input=[user(text("what is "), image(url(), detail="high"), text("?"))])
    assert first.output_text == "ok"
    assert prompt_of(engine).startswith(f"<|im_start|>user\nwhat is {START}{IMAGE * 6}{END}?")
    assert first.usage.input_tokens_details.to_dict()["image_tokens"] == 6
    second = client.responses.create(model="tiny", input=[user(text("and "), image(url(32, 32)))], previous_response_id=first.id)
    assert [shown.grid for shown in engine.requests[-1].pictures] == [(4, 6), (2, 2)]
    assert second.usage.input_tokens_details.to_dict()["image_tokens"] == 7
    client.responses.create(model="tiny", input="more", previous_response_id=second.id)
    one, two = engine.requests[-1].pictures
    assert engine.requests[-1].prompt[one.span.first : one.span.end] == (IMAGE_ID,) * 6
    assert two.span.end - two.span.first == 1


def test_results_of_functions_may_be_pictures(served):
    client, engine, _ = served
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [text("seen "), image(url())]}
    client.responses.create(model="tiny", input=[user(text("look")), call, output])
    assert f"tool\nseen {START}{IMAGE * 6}{END}" in prompt_of(engine)


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "input_image"}, "input[0].content[0].image_url", "invalid_image_url"),
        ({"type": "input_image", "image_url": {"url": url()}}, "input[0].content[0].image_url", "invalid_image_url"),
        ({"type": "input_image", "file_id": "f"}, "file_id", "unknown_field"),
        (image(url(), detail="most"), "input[0].content[0].detail", "invalid_field"),
        (image("data:image/png;base64,AAAA"), "input[0].content[0].image_url", "unsupported_image_media_type"),
        ({"type": "input_file", "file_id": "f"}, "input[0].content[0]", "invalid_field"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_place(served, part, param, code):
    with pytest.raises(openai.BadRequestError) as caught:
        served[0].responses.create(model="tiny", input=[user(part, image(url()))])
    assert (caught.value.param, caught.value.code) == (param, code)


def test_pictures_of_the_assistant_are_refused(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served[0].responses.create(model="tiny", input=[{"role": "assistant", "content": [image(url())]}])
    assert caught.value.param == "input[0].content[0]"


def test_a_websocket_takes_pictures_and_keeps_them(served):
    _, engine, address = served

    async def said(stream):
        return [event async for event in stream][-1]

    async def talk():
        async with await Client.connect(address.replace("http://", "ws://") + "/responses") as client:
            first = await said(client.create([user(image(url(128, 128)), text("x"))]))
            second = await said(client.create("y", previous_response_id=first["response"]["id"]))
            return first, second, await said(client.create([user(image("data:image/png;base64,AAAA"))]))

    first, second, refused = asyncio.run(talk())
    for event in (first, second):
        assert event["response"]["usage"]["input_tokens_details"]["image_tokens"] == 16
    assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_image_media_type", "input[0].content[0].image_url")
    assert [shown.grid for shown in engine.requests[-1].pictures] == [(8, 8)]


def test_a_response_that_is_only_computed_has_its_pictures(served):
    client, engine, _ = served
    client.responses.create(model="tiny", input=[user(image(url()), text("x"))], extra_body={"generate": False})
    assert engine.requests[-1].max_tokens == 1
    assert len(engine.requests[-1].pictures) == 1
