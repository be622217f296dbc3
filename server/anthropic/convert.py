"""A request of Anthropic's API as that of a chat, which is what the model's template reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ...graphs.errors import RequestError
from ..openai.request_models import ChatRequest
from ..requests.bodies import validate
from ..requests.left_out import LeftOut
from .bodies import CountRequest, Image, ImageData, MessagesRequest, Redacted, Text, Thinking, ToolReference, ToolResult, Turn, UsedTool

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountRequest, path: str) -> tuple[ChatRequest, list[LeftOut]]:
    """The chat, and what the request has that no prompt can have: tools that the provider would run.

    Raises:
        RequestError: a block stands where none of its kind may, or a field is not legal.
    """
    tools, left_out = _tools(body.tools)
    fields: dict[str, Any] = {"model": body.model, "messages": list(_messages(body))}
    if tools:
        fields["tools"] = tools
    if body.tool_choice and tools:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif body.output_config and body.output_config.effort:
        fields["reasoning_effort"] = body.output_config.effort
    elif body.thinking and body.thinking.type == "enabled":
        fields["reasoning_effort"] = "high"
    if body.output_config and body.output_config.format:
        schema = {"name": "output", "schema": body.output_config.format.get("schema")}
        fields["response_format"] = {"type": body.output_config.format.get("type"), "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream}
        fields |= {"stop": body.stop_sequences} if body.stop_sequences else {}
        chosen = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        fields |= {name: value for name, value in chosen.items() if value is not None}
    return validate(ChatRequest, fields, path), left_out


def _tools(entries: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[LeftOut]]:
    tools: list[dict[str, Any]] = []
    left_out: list[LeftOut] = []
    for index, entry in enumerate(entries):
        kind, where = entry.get("type", "custom"), f"tools[{index}]"
        if kind != "custom":
            left_out.append(LeftOut(where, f"a tool of type {kind!r} is run by its provider, and is left out"))
            continue
        if not isinstance(entry.get("name"), str):
            raise RequestError(f"{where}.name is missing; legal is a tool with name and input_schema", param=f"{where}.name")
        function = {"name": entry["name"], "description": entry.get("description", ""), "parameters": entry.get("input_schema", {})}
        strict = {"strict": True} if entry.get("strict") else {}
        tools.append({"type": "function", "function": function | strict})
    return tools, left_out


def _messages(body: CountRequest) -> Iterable[dict[str, Any]]:
    if system := _text(body.system):
        yield {"role": "system", "content": system}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _of_assistant(message, where)
        else:
            yield from _of_user(message, where)


def _of_user(message: Turn, where: str) -> Iterable[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        if isinstance(block, ToolResult):
            # Results come before what the user says beside them, as chats have it.
            shown = [] if isinstance(block.content, str) else [each for each in block.content if isinstance(each, Image)]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            parts += [_picture(each.source) for each in shown]
        elif isinstance(block, Text):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, Image):
            parts.append(_picture(block.source))
        else:
            raise _misplaced(f"{where}.content[{place}]", message.role, "text, image and tool_result")
    if parts:
        yield {"role": message.role, "content": parts}


def _of_assistant(message: Turn, where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, UsedTool):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, Redacted):
            raise _misplaced(f"{where}.content[{place}]", message.role, "text, thinking and tool_use")
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return answer | ({"reasoning_content": "".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _misplaced(where: str, role: str, legal: str) -> RequestError:
    return RequestError(f"{where}.type is not one of a message of {role!r}; legal are {legal}", param=f"{where}.type")


def _picture(source: ImageData) -> dict[str, Any]:
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: str | Sequence[Text | Image | ToolReference]) -> str:
    if isinstance(content, str):
        return content
    # A tool that was found is said by its name; what it takes stands among the tools.
    return "\n".join(block.text if isinstance(block, Text) else block.tool_name for block in content if not isinstance(block, Image))
