"""How kinds of models write tool calls. Formats have the names that vLLM and SGLang gave their parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from .json_reader import JsonReader, read_json
from .tagged_reader import TaggedReader, Tags
from .tool_calls import CallFormat, CallIds, CallReader, TaggedArguments, Tools

SEP = "<｜tool▁sep｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML = "｜DSML｜"
FUNCTION = "<function="
ARGUMENTS_OF = "<|tool_call_argument_begin|>"
NAMED = '{"name": "'
ARGUMENTS, ABOUT = ("arguments", "parameters"), ("id", "type")
"""What models call the arguments of a call, and what they may write of it besides."""

_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FENCE = re.compile(rf"[^\n]*?{SEP}(?P<name>[^\n]+)\n```json\n\s*(?=\{{)")
_NUMBERED = re.compile(rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+):\d+)\s*{re.escape(ARGUMENTS_OF)}\s*(?=\{{)")
_LISTED = re.compile(
    r'\s*(?:[\[,]?\s*\{\s*"name"\s*:\s*)?(?P<name>"(?:[^"\\]|\\.)*"|[^\s"\[\]{},]+)\s*'
    r'(?:,\s*"(?:arguments|parameters)"\s*:|(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?)\s*(?=\{)'
)
_BARE = re.compile(rf"(?P<name>(?:(?!{SEP}).)*){SEP}\s*(?=\{{)", re.DOTALL)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("no name")
    return name.strip()


def _json_name(text: str) -> str:
    return _name(json.loads(text))


def _whole(body: str) -> list[tuple[str, str]]:
    """`{"name": ..., "arguments": {...}}` in any order, or a list of such. Arguments may be left out, or be the text of an object."""
    calls = read_json(body)
    return [_call(call) for call in (calls if isinstance(calls, list) and calls else [calls])]


def _call(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict) or not call.keys() <= {"name", *ARGUMENTS, *ABOUT} or call.keys() >= set(ARGUMENTS):
        raise ValueError("no call, or one with more than a name and arguments")
    arguments = call.get(ARGUMENTS[0], call.get(ARGUMENTS[1]))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("arguments are no object")
    return _name(call.get("name")), json.dumps(arguments or {}, ensure_ascii=False)


def _none(_: str) -> list[tuple[str, str]]:
    raise ValueError("no call")


def _numbered(body: str) -> list[tuple[str, str]]:
    """`functions.NAME:NUMBER<mark>` without an object behind it."""
    header = _NUMBERED.match(body.rstrip() + "{")
    return [(_name(header["name"]), "{}")] if header and header.end() == len(body.rstrip()) else _none(body)


def json_reader(_: Tools) -> CallReader:
    """`{"name": ..., "arguments": {...}}`."""
    return JsonReader(_NAMED, _json_name, _whole, "}")


def fenced_reader(_: Tools) -> CallReader:
    """`function<sep>NAME`, and the arguments in a fence of Markdown."""
    return JsonReader(_FENCE, _name, _none, "```")


def bare_reader(_: Tools) -> CallReader:
    """`NAME<sep>{...}`."""
    return JsonReader(_BARE, _name, _none)


def numbered_reader(_: Tools) -> CallReader:
    """`functions.NAME:NUMBER<mark>{...}`, of which what is before the mark is the call's id."""
    return JsonReader(_NUMBERED, _name, _numbered)


def open_reader(_: Tools) -> CallReader:
    """`{"name": ..., "parameters": {...}}` without marks, begun by `NAMED`; several have semicolons between them."""
    return JsonReader(_NAMED, _json_name, _whole, "}", ";", begun=NAMED)


def listed_reader(_: Tools) -> CallReader:
    """An entry of a list of `{"name": ..., "arguments": {...}}`, or `NAME[ARGS]{...}`."""
    return JsonReader(_LISTED, lambda name: _json_name(name) if name.startswith('"') else _name(name), _whole, "}", "]")


XML_TAGS = Tags(
    header=re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    argument=re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>"),
    argument_mark="<parameter=",
    close="</parameter>",
    block=("<tool_call>", "</tool_call>"),
    tail_mark="</function>",
    header_mark=FUNCTION,
    trims=True,
)
"""`<function=NAME><parameter=NAME>VALUE</parameter>...</function>`; the tool's schema says which values are JSON."""

INVOKE_TAGS = Tags(
    header=re.compile(r'\s*name="(?P<name>[^"\n]+)"\s*>'),
    argument=re.compile(rf'\s*<{DSML}parameter\s+name="(?P<key>[^"\n]+)"\s+string="(?P<string>true|false)"\s*>'),
    argument_mark=f"<{DSML}parameter",
    close=f"</{DSML}parameter>",
    block=(f"<{DSML}invoke", f"</{DSML}invoke>"),
)
"""Attributes and parameters of an `invoke` element, each of which says whether it is a string or JSON."""

PLAIN_INVOKE_TAGS = Tags(
    header=re.compile(r'(?P<name>[^"\n]+)"\s*>'),
    argument=re.compile(r'\s*<parameter name="(?P<key>[^"\n]+)"\s*>'),
    argument_mark="<parameter name=",
    close="</parameter>",
    block=('<invoke name="', "</invoke>"),
)
"""The same without marks of its own; the tool's schema says which values are JSON."""

KEY_TAGS = Tags(
    header=re.compile(r"\s*(?P<name>[^\s<]+)\s*(?=<arg_key>)"),
    argument=re.compile(r"\s*<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>"),
    argument_mark="<arg_key>",
    argument_end="<arg_value>",
    close="</arg_value>",
    block=("<tool_call>", "</tool_call>"),
)
"""`NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>...`, with line breaks or without; the schema says which values are JSON."""


GLM = partial(CallFormat, "<tool_call>", "</tool_call>", partial(TaggedReader, KEY_TAGS), ends_reasoning=True)
MISTRAL = partial(
    CallFormat, "[TOOL_CALLS]", "", listed_reader, comma=",", ids=CallIds(re.compile(r"[A-Za-z0-9]{9}"), lambda _, number: f"{number:09d}")
)

FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        "<tool_call>", "</tool_call>", json_reader, ("<tool_call>",),
        lambda name: f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', tail="}\n", between="\n",
        aliases=("qwen", "qwen25"),
    ),
    "qwen3_coder": CallFormat(
        "<tool_call>", "</tool_call>", partial(TaggedReader, XML_TAGS), ("<tool_call>", FUNCTION),
        lambda name: f"\n<function={name}>\n", tail="</function>\n", between="\n",
        arguments=TaggedArguments(lambda name, _: f"<parameter={name}>\n", "\n</parameter>\n"), aliases=("qwen3_xml",),
        bare=FUNCTION, name_end=">",
    ),
    "deepseek_v3": CallFormat(
        CALL_BEGIN, CALL_END, fenced_reader, (CALL_BEGIN, "```json"), lambda name: f"function{SEP}{name}\n```json\n", tail="\n```",
        before=CALLS[0], after=CALLS[1], between="\n", aliases=("deepseekv3",),
    ),
    "deepseek_v31": CallFormat(
        CALL_BEGIN, CALL_END, bare_reader, (CALL_BEGIN,), lambda name: f"{name}{SEP}", before=CALLS[0], after=CALLS[1],
        aliases=("deepseekv31",),
    ),
    "deepseek_v32": CallFormat(
        f"<{DSML}invoke", f"</{DSML}invoke>", partial(TaggedReader, INVOKE_TAGS), (DSML,), lambda name: f' name="{name}">\n',
        before=f"<{DSML}function_calls>\n", after=f"\n</{DSML}function_calls>", between="\n",
        arguments=TaggedArguments(
            lambda name, text: f'<{DSML}parameter name="{name}" string="{"true" if text else "false"}">', f"</{DSML}parameter>\n"
        ),
        aliases=("deepseekv32",),
    ),
    "glm45": GLM(
        ("<tool_call>", "<arg_key>"), lambda name: f"{name}\n", between="\n",
        arguments=TaggedArguments(lambda name, _: f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm47": GLM(
        ("<tool_call>", "<arg_key>", "</arg_key><arg_value>"),
        arguments=TaggedArguments(lambda name, _: f"<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
    ),
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>", "<|tool_call_end|>", numbered_reader, ("<|tool_call_begin|>", ARGUMENTS_OF),
        lambda name: f"functions.{name}:", ARGUMENTS_OF, before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
        ends_reasoning=True, ids=CallIds(re.compile(r"functions\..+:\d+"), lambda name, number: f"functions.{name}:{number}"),
    ),
    "minimax_m2": CallFormat(
        '<invoke name="', "</invoke>", partial(TaggedReader, PLAIN_INVOKE_TAGS), ("<minimax:tool_call>",), lambda name: f'{name}">\n',
        before="<minimax:tool_call>\n", after="\n</minimax:tool_call>", between="\n", name_end='"',
        arguments=TaggedArguments(lambda name, _: f'<parameter name="{name}">', "</parameter>\n"), aliases=("minimax-m2",),
    ),
    "llama3_json": CallFormat(
        NAMED, "", open_reader, ("<|start_header_id|>", '"parameters": '),
        lambda name: f'{json.dumps(name, ensure_ascii=False)[1:]}, "parameters": ', tail="}",
        between="; ", name_end='"', others=('{"type": "function", "name": "',), ignored=("<|python_tag|>",), aliases=("llama3",),
    ),
    "mistral": MISTRAL(
        ("[TOOL_CALLS]",), lambda name: f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', tail="}", brackets=("[", "]"),
        between=", ",
    ),
    "mistral_args": MISTRAL(("[TOOL_CALLS]", "[ARGS]"), lambda name: f"{name}[ARGS]"),
}  # fmt: skip

ALIASES: Mapping[str, str] = {alias: name for name, form in FORMATS.items() for alias in form.aliases}


def choose(template: str) -> str | None:
    """The format that a chat template tells its model to write calls in; None where it knows no tools.

    Of several whose texts it has it is the one that writes most of them itself: that of calls without marks, Llama's, comes last.
    """
    shown = [name for name, form in FORMATS.items() if all(text in template for text in form.shown)]
    return max(shown, key=lambda name: sum(text in FORMATS[name].text for text in FORMATS[name].shown), default=None)
