"""`/v1/messages` and `/v1/messages/count_tokens`: chats, as clients of Anthropic's API have them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.prompts import counted, rendered
from ..guard.work import off_loop
from ..openai.api import Api, new_id, takes_long
from ..openai.chat import chat_of as template_chat
from ..openai.chat import parser_of, ready
from ..openai.choices import pieces
from ..openai.errors import EngineFailure, EngineTimeout, failure
from ..openai.messages import pictures_of
from ..openai.routes import Post
from ..openai.sse import EventStream, whole
from ..requests.bodies import validate
from .blocks import REASONS, Blocks, MessageFrames, usage_object, why_cut
from .bodies import CountRequest, MessagesRequest
from .convert import chat_of
from .errors import message_error


async def messages(api: Api, given: dict[str, Any], request: Request) -> Response:
    """Answers a request.

    Raises:
        RequestError: it cannot be served.
    """
    service = api.service()
    asked = validate(MessagesRequest, given, "/v1/messages")
    given.clear()
    body, left_out = chat_of(asked, "/v1/messages")
    service.check_model(body.model)
    name = new_id("msg_")
    warnings = service.left_out.warnings(left_out)
    prepared = await ready(api, service, body, request, name)
    blocks = Blocks(parser_of(body, service, prepared.prompt.text, prepared.so_far))
    header: dict[str, Any] = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": service.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(prepared.prompt.token_ids), "output_tokens": 0},
    }
    if warnings:
        header["warnings"] = warnings
    live = api.generate(name, prepared.requests, prepared.options, request, streams=body.stream)
    if body.stream:
        return EventStream(live, MessageFrames(header, blocks))
    end = None
    for _, delta, last in pieces(await whole(live, request.receive)):
        if delta:
            list(blocks.push(delta.text))
        end = last or end
    assert end is not None
    if end.reason == "error":
        raise failure(end)
    if end.reason not in REASONS:
        raise (EngineTimeout if end.reason == "timeout" else EngineFailure)(why_cut(end))
    list(blocks.finish())
    reason, sequence = blocks.reason(end)
    ended = {"content": blocks.content, "stop_reason": reason, "stop_sequence": sequence, "usage": usage_object(end.usage)}
    return JSONResponse(header | ended)


async def count_tokens(api: Api, given: dict[str, Any], _: Request) -> Response:
    """Tokens of the prompt that a request would have.

    Raises:
        RequestError: it could not be served.
    """
    service = api.serving()
    body, _left_out = chat_of(validate(CountRequest, given, "/v1/messages/count_tokens"), "/v1/messages/count_tokens")
    service.check_model(body.model)
    chat = template_chat(body, service)
    chars = sum(len(str(message["content"])) for message in chat.messages)
    counts = await counted(service, pictures_of(body.messages), None)
    prompt = (await off_loop(takes_long(chars), lambda: rendered(service, chat, counts, "messages")))[1]
    return JSONResponse({"input_tokens": len(prompt)})


POSTS = (
    Post("/v1/messages", None, messages, told=message_error),
    Post("/v1/messages/count_tokens", None, count_tokens, told=message_error),
)
