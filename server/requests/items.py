"""Items of a conversation: validated from the `input` of a response, and turned into messages for a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from .fields import FieldError, refuse_unknown, show
from .left_out import LeftOut
from .pictures import Content, Detail, PicturePart, picture_part
from .tool_fields import INPUT, Offer
from .tools import MAX_TOOLS, brought, in_namespace, read_tools

MAX_MESSAGES = 4096
MAX_NAME_CHARS = 256
ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS, REFUSAL, IMAGE = ("input_text", "output_text"), "refusal", "input_image"
ITEM_BYTES = 128
"""What an item is counted for beside its text, where memory is bounded."""

HINTS = (
    *("agent", "async", "cache_control", "caller", "created_by", "end_turn", "internal_chat_message_metadata_passthrough"),
    *("parsed_arguments", "prompt_cache_breakpoint", "provider_specific_fields"),
)
"""Fields of items and their parts that change no answer, such as where a provider is to keep a prompt."""

LEFT_OUT = frozenset(
    {
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call", "computer_call_output"),
        *("file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output"),
        *("tool_search_call", "web_search_call"),
    }
)
"""Items of the provider's own tools, which no prompt can have."""

_HALF, _HALF_ESCAPE = re.compile("[\ud800-\udfff]"), re.compile(r"\\u[dD]")


@dataclass(frozen=True)
class ChatMessage:
    """What somebody says.

    Attributes:
        parts: its text and pictures in order; empty where there are no pictures.
    """

    role: str
    text: str
    parts: tuple[Content, ...] = ()


@dataclass(frozen=True)
class ReasoningItem:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallItem:
    """A call of a tool by the model; `arguments` is the text of a JSON object, or the beginning of one where the call was cut."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallOutput:
    """What a tool returned; `parts` as of `ChatMessage`."""

    call_id: str
    text: str
    parts: tuple[Content, ...] = ()


@dataclass(frozen=True)
class AddedTools:
    """Tools that a conversation has from some item on; the prompt has them beside those of the request."""

    tools: tuple[Offer | LeftOut, ...]

    @cached_property
    def text(self) -> str:
        """What they add to the prompt, about."""
        return json.dumps([tool.function for tool in self.tools if isinstance(tool, Offer)], ensure_ascii=False)


Item = ChatMessage | ReasoningItem | CallItem | CallOutput | AddedTools


def pictures_of(items: Sequence[Item]) -> list[PicturePart]:
    """The pictures of items, in order."""
    return [part for item in items for part in getattr(item, "parts", ()) if isinstance(part, PicturePart)]


def size_bytes(items: Sequence[Item]) -> int:
    """What items are counted for, where memory is bounded, beside their pictures."""
    return sum(ITEM_BYTES + len(text_of(item).encode()) for item in items)


def text_of(item: Item) -> str:
    """The text that an item adds to the prompt."""
    return item.arguments if isinstance(item, CallItem) else item.text


def read_items(value: Any, param: str = "input") -> tuple[Item | LeftOut, ...]:
    """The items of an `input` that is a list, those that are left out among them.

    Raises:
        FieldError: one of them is not legal.
    """
    if not isinstance(value, list):
        raise FieldError(f"{param} is {show(value)}; legal is a string or a list of items", param=param)
    if len(value) > MAX_MESSAGES:
        raise FieldError(f"{param} has {len(value)} items; legal are at most {MAX_MESSAGES}", param=param)
    if (tools := brought(value)) > MAX_TOOLS:
        raise FieldError(f"items of {param} bring {tools} tools; legal are at most {MAX_TOOLS}", param=param)
    return tuple(_item(item, f"{param}[{i}]") for i, item in enumerate(value))


def template_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as messages for a chat template: reasoning, text and calls of one turn of the assistant are one message."""
    messages: list[dict[str, Any]] = []
    names = {item.call_id: item.name for item in items if isinstance(item, CallItem)}
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, AddedTools):
            continue
        if isinstance(item, CallOutput):
            named = {"name": names[item.call_id]} if item.call_id in names else {}
            messages.append({"role": "tool", "tool_call_id": item.call_id, **named, "content": _content(item)})
            turn = None
        elif isinstance(item, ChatMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item)})
            turn = None
        else:
            if turn is None or not _continues(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    return messages


def _content(item: ChatMessage | CallOutput) -> str | list[dict[str, Any]]:
    """The content for a chat template: a text, or a list of parts where there are pictures."""
    if not item.parts:
        return item.text
    return [{"type": "image"} if isinstance(part, PicturePart) else {"type": "text", "text": part} for part in item.parts]


def _continues(turn: Mapping[str, Any], item: Item) -> bool:
    """Whether an item of the assistant belongs to the message that the ones before it make."""
    if isinstance(item, CallItem):
        return True
    started = bool(turn["content"]) or "tool_calls" in turn
    return not started and (isinstance(item, ChatMessage) or "reasoning_content" not in turn)


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = item.text
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": read_arguments(item.arguments)}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        turn["content"] = text_of(item)


def read_arguments(text: str) -> dict[str, Any] | str:
    """Arguments of a call as chat templates read them, with U+FFFD for half a surrogate pair.

    Returns:
        An object, which without arguments is empty; the text itself where it is none, as of a call that was cut.
    """
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
        if _HALF_ESCAPE.search(text):
            value = json.loads(without_halves(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else {} if value is None else text


def without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which a model may write as an escape."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _item(item: Any, where: str) -> Item | LeftOut:
    if not isinstance(item, dict):
        raise FieldError(f"{where} is {show(item)}; legal is an item, an object (token ids go into input_token_ids)", param=where)
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in LEFT_OUT:
        why = f"an item of type {show(kind)} is of a tool that this server does not have, and the prompt does not have it"
        return LeftOut(where, why)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise FieldError(f"{where}.type is {show(kind)}; legal are {list(_READERS)}", param=f"{where}.type")
    return reader(item, where)


def _known(item: Mapping[str, Any], legal: Sequence[str], where: str) -> None:
    refuse_unknown(item, ("type", "id", "status", *legal, *HINTS), where)


def _message(item: Mapping[str, Any], where: str) -> ChatMessage:
    # With what an output item of an earlier response has.
    _known(item, ("role", "content", "phase"), where)
    if item.get("role") not in ROLES:
        raise FieldError(f"{where}.role is {show(item.get('role'))}; legal are {list(ROLES)}", param=f"{where}.role")
    may_show = item["role"] != "assistant"
    return ChatMessage(item["role"], *_parts(item.get("content"), f"{where}.content", may_show))


def _reasoning(item: Mapping[str, Any], where: str) -> ReasoningItem | LeftOut:
    _known(item, ("summary", "content", "encrypted_content"), where)
    content = item.get("content", [])
    if not content and item.get("encrypted_content"):
        return LeftOut(where, "its reasoning is encrypted by another server, and the prompt does not have it")
    # A summary is about the reasoning, and no model wrote it into its context.
    return ReasoningItem(_text(content, f"{where}.content", ("reasoning_text",)))


def _call(item: Mapping[str, Any], where: str) -> CallItem:
    _known(item, ("call_id", "name", "arguments", "namespace"), where)
    arguments = item.get("arguments", "")
    if not isinstance(arguments, str):
        param = f"{where}.arguments"
        raise FieldError(f"{param} is {show(arguments)}; legal is the text of a JSON object", param=param)
    return CallItem(_required(item, "call_id", where), _name(item, where), arguments)


def _custom_call(item: Mapping[str, Any], where: str) -> CallItem:
    _known(item, ("call_id", "name", "input", "namespace"), where)
    if not isinstance(item.get(INPUT), str):
        raise FieldError(f"{where}.input is {show(item.get(INPUT))}; legal is a string", param=f"{where}.input")
    return CallItem(_required(item, "call_id", where), _name(item, where), json.dumps({INPUT: item[INPUT]}, ensure_ascii=False))


def _name(item: Mapping[str, Any], where: str) -> str:
    """Of a function in the prompt."""
    return in_namespace(item.get("namespace"), _required(item, "name", where))


def _output(item: Mapping[str, Any], where: str) -> CallOutput:
    _known(item, ("call_id", "output", "name", "namespace"), where)
    return CallOutput(_required(item, "call_id", where), *_parts(item.get("output"), f"{where}.output", True))


def _added_tools(item: Mapping[str, Any], where: str) -> AddedTools:
    _known(item, ("role", "tools", "call_id", "execution"), where)
    return AddedTools(read_tools(item.get("tools"), f"{where}.tools"))


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Item | LeftOut]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "additional_tools": _added_tools,
    "tool_search_output": _added_tools,
}


def _required(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        param = f"{where}.{name}"
        raise FieldError(f"{param} is {show(value)}; legal is a string of 1 to {MAX_NAME_CHARS} characters", param=param)
    return value


def _parts(content: Any, where: str, may_show: bool) -> tuple[str, tuple[Content, ...]]:
    """The text of a content, and its parts if there are pictures among them."""
    pictures = [i for i, part in enumerate(content) if _is_picture(part)] if isinstance(content, list) and may_show else []
    if not pictures:
        return _text(content, where, (*TEXT_PARTS, IMAGE) if may_show else (*TEXT_PARTS, REFUSAL)), ()
    if len(content) > MAX_MESSAGES:
        raise FieldError(f"{where} has {len(content)} parts; legal are at most {MAX_MESSAGES}", param=where)
    parts = tuple(
        _picture(part, f"{where}[{i}]") if i in set(pictures) else _text_of(part, f"{where}[{i}]", (*TEXT_PARTS, IMAGE))
        for i, part in enumerate(content)
    )
    return "".join(part for part in parts if isinstance(part, str)), parts


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == IMAGE


def _picture(part: Mapping[str, Any], where: str) -> PicturePart:
    part = {name: value for name, value in part.items() if value is not None}
    refuse_unknown(part, ("type", "image_url", "detail", *HINTS), where)
    if part.get("detail", "auto") not in get_args(Detail):
        at = f"{where}.detail"
        raise FieldError(f"{at} is {show(part['detail'])}; legal are {list(get_args(Detail))}", param=at)
    return picture_part(part.get("image_url"), f"{where}.image_url")


def _text(content: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(f"{where} is {show(content)}; legal is a string or a list of parts", param=where)
    if len(content) > MAX_MESSAGES:
        raise FieldError(f"{where} has {len(content)} parts; legal are at most {MAX_MESSAGES}", param=where)
    return "".join([_text_of(part, f"{where}[{i}]", kinds) for i, part in enumerate(content)])


def _text_of(part: Any, where: str, kinds: Sequence[str]) -> str:
    text = part.get(REFUSAL if part.get("type") == REFUSAL else "text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") not in kinds:
        raise FieldError(f"{where} is {show(part)}; legal is an object with type in {list(kinds)} and text", param=where)
    return text
