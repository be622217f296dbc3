"""Messages of a request as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...graphs.errors import RequestError
from ..requests.items import read_arguments
from ..requests.pictures import PicturePart, picture_part
from ..requests.tool_fields import INPUT
from .request_models import ImagePart, MessageToolCall, Part, RequestMessage, TextPart, VideoPart


def messages_of(messages: Sequence[RequestMessage]) -> list[dict[str, Any]]:
    """The messages: content is text, or a list of parts where there are pictures; arguments of calls are objects, or text where they are no
    JSON.

    Raises:
        RequestError: a message is not legal.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def pictures_of(messages: Sequence[RequestMessage]) -> list[PicturePart]:
    """The pictures and videos of the messages, in order.

    Raises:
        RequestError: one has no legal URL, or is where no picture may be.
    """
    pictures: list[PicturePart] = []
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, TextPart):
                continue
            where = f"messages[{index}].content[{number}]"
            if message.role == "assistant":
                what = "a picture" if isinstance(part, ImagePart) else "a video"
                raise RequestError(f"{where} is {what} of the assistant; legal is text, which models write alone", param=where)
            if isinstance(part, ImagePart):
                pictures.append(picture_part(part.image_url.url.take(), f"{where}.image_url.url"))
            else:
                pictures.append(picture_part(part.video_url.url.take(), f"{where}.video_url.url", "video"))
    return pictures


def _message(message: RequestMessage, where: str) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            values[name] = getattr(message, name)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        values["reasoning_content"] = reasoning
    if message.tool_calls:
        values["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]
    return values


def _content(message: RequestMessage, where: str) -> str | list[dict[str, Any]]:
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is missing; only messages of the assistant may have none", param=f"{where}.content")
    if not isinstance(message.content, list):
        return "\n".join(filter(None, (message.content, message.refusal)))
    if any(isinstance(part, ImagePart | VideoPart) for part in message.content):
        return [_shown(part, f"{where}.content[{index}]") for index, part in enumerate(message.content)]
    # As vLLM joins parts for templates that read a text.
    texts = (part for part in message.content if isinstance(part, TextPart))
    return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(texts))


def _shown(part: Part, where: str) -> dict[str, Any]:
    """A part as chat templates read it; that of Qwen3.5 refuses the type video_url."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": _part(part, where)}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _part(part: TextPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise RequestError(f"{where} has no text", param=where)
    return text


def _call(call: MessageToolCall, where: str) -> dict[str, Any]:
    if call.custom is not None:
        name: str = call.custom.name
        arguments: dict[str, Any] | str = {INPUT: call.custom.input}
    elif call.function is not None:
        name, given = call.function.name, call.function.arguments or ""
        arguments = read_arguments(given) if isinstance(given, str) else given
    else:
        param = f"{where}.{call.type}"
        raise RequestError(f"{param} is missing in a call of that type", param=param, code="missing_field")
    values = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return values if call.id is None else {"id": call.id, **values}
