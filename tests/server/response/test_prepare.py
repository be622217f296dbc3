"""server/response/prepare.py: what a body asks to be kept, and a prompt that is only computed."""

from __future__ import annotations

import asyncio

import pytest
from support.texts import byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.requests.create_body import Conversation, read_create
from npucompile.server.requests.items import ChatMessage
from npucompile.server.response.prepare import Owners, continued, keeping, prepare
from npucompile.server.response.run import Keeping
from npucompile.server.storage.store import StoredResponse

TEMPLATE = "{% if not messages %}{{ raise_exception('nobody speaks') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
HTTP, SOCKET = Owners("me"), Owners("me", "socket")


def service(room=10**6):
    template = ChatTemplate(TEMPLATE + "{% if add_generation_prompt %}>{% endif %}")
    limits = SocketLimits(max_stored_bytes=room)
    return Service(None, byte_codec(), ServedModel("tiny", 64, 300), chat=ChatFormat(template), limits=limits)


@pytest.mark.parametrize(
    ("fields", "over_http", "on_a_socket"),
    [
        ({}, Keeping("me", whole=True), Keeping("me", whole=True)),
        ({"store": False}, Keeping(None), Keeping("socket")),
        ({"resumable": True}, Keeping("me", whole=True, resumable=True), Keeping("me", whole=True, resumable=True)),
        ({"resumable": True, "store": False}, Keeping("me", resumable=True), Keeping("me", resumable=True)),
        ({"background": True}, Keeping("me", whole=True, background=True), Keeping("me", whole=True, background=True)),
    ],
)
def test_what_is_kept_depends_on_who_may_ask_for_it(fields, over_http, on_a_socket):
    body = read_create({"input": "a", **fields})
    assert (keeping(service(), body, HTTP), keeping(service(), body, SOCKET)) == (over_http, on_a_socket)


@pytest.mark.parametrize(
    ("fields", "room", "param"),
    [
        ({"store": True}, 0, "store"),
        ({"background": True}, 0, "background"),
        ({"resumable": True}, 0, "resumable"),
        ({"background": True, "store": False}, 10**6, "background"),
    ],
)
def test_what_cannot_be_kept_is_refused(fields, room, param):
    with pytest.raises(RequestError) as caught:
        keeping(service(room), read_create({"input": "a", **fields}), HTTP)
    assert caught.value.param == param
    assert keeping(service(0), read_create({"input": "a"}), HTTP) == Keeping()


def test_a_conversation_that_is_kept_comes_first():
    facade = service()
    facade.store.put(StoredResponse("resp_1", "socket", (ChatMessage("user", "a"), ChatMessage("assistant", "b"))))
    body = read_create({"input": "c", "previous_response_id": "resp_1"})
    items = (ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c"))
    assert asyncio.run(continued(facade, body, SOCKET)).prompt == Conversation(items)
    with pytest.raises(RequestError, match="'resp_1' not found"):
        asyncio.run(continued(facade, body, HTTP))
    assert asyncio.run(continued(facade, read_create({"input": "c"}), HTTP)).prompt == "c"


def test_what_is_only_computed_ends_where_the_next_turn_goes_on():
    def prompts(body):
        return [byte_codec().decode(request.prompt) for request in prepare(service(), read_create(body), "r").requests]

    turn = [{"role": "user", "content": "a"}]
    assert prompts({"input": turn}) == ["a>"]
    assert prompts({"input": turn, "generate": False}) == ["a"]
    assert prompts({"input": [], "generate": False}) == []
    prepared = prepare(service(), read_create({"input": turn, "generate": False, "max_output_tokens": 60}), "r")
    assert [request.max_tokens for request in prepared.requests] == [1]
    with pytest.raises(RequestError, match="nobody speaks"):
        prompts({"input": [], "instructions": None, "previous_response_id": "r"})
