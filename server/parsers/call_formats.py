"""How kinds of models write tool calls. Formats have the names that vLLM and SGLang gave their parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from .json_reader import JsonReader, read_json
from .tagged_reader import TaggedReader, Tags
from .tool_calls import CallFormat, CallReader, TaggedArguments, Tools

SEP = "<｜tool▁sep｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML = "｜DSML｜"
FUNCTION = "<function="
ARGUMENTS, ABOUT = ("arguments", "parameters"), ("id", "type")
"""What models call the arguments of a call, and what they may write of it besides."""

_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FENCE = re.compile(rf"[^\n]*?{SEP}(?P<name>[^\n]+)\n```json\n\s*(?=\{{)")
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


def json_reader(_: Tools) -> CallReader:
    """`{"name": ..., "arguments": {...}}`."""
    return JsonReader(_NAMED, _json_name, _whole, "}")


def fenced_reader(_: Tools) -> CallReader:
    """`function<sep>NAME`, and the arguments in a fence of Markdown."""
    return JsonReader(_FENCE, _name, _none, "```")


def bare_reader(_: Tools) -> CallReader:
    """`NAME<sep>{...}`."""
    return JsonReader(_BARE, _name, _none)


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


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        "<tool_call>", "</tool_call>", json_reader,
        lambda name: f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}\n", between="\n", aliases=("qwen", "qwen25"),
    ),
    "qwen3_coder": CallFormat(
        "<tool_call>", "</tool_call>", partial(TaggedReader, XML_TAGS), lambda name: f"\n<function={name}>\n", "</function>\n",
        between="\n", arguments=TaggedArguments(lambda name, _: f"<parameter={name}>\n", "\n</parameter>\n"), aliases=("qwen3_xml",),
        bare=FUNCTION,
    ),
    "deepseek_v3": CallFormat(
        CALL_BEGIN, CALL_END, fenced_reader, lambda name: f"function{SEP}{name}\n```json\n", "\n```", before=CALLS[0], after=CALLS[1],
        between="\n", aliases=("deepseekv3",),
    ),
    "deepseek_v31": CallFormat(
        CALL_BEGIN, CALL_END, bare_reader, lambda name: f"{name}{SEP}", before=CALLS[0], after=CALLS[1], aliases=("deepseekv31",)
    ),
    "deepseek_v32": CallFormat(
        f"<{DSML}invoke", f"</{DSML}invoke>", partial(TaggedReader, INVOKE_TAGS), lambda name: f' name="{name}">\n',
        before=f"<{DSML}function_calls>\n", after=f"\n</{DSML}function_calls>", between="\n",
        arguments=TaggedArguments(
            lambda name, text: f'<{DSML}parameter name="{name}" string="{"true" if text else "false"}">', f"</{DSML}parameter>\n"
        ),
        aliases=("deepseekv32",),
    ),
}  # fmt: skip

ALIASES: Mapping[str, str] = {alias: name for name, form in FORMATS.items() for alias in form.aliases}


def choose(template: str) -> str | None:
    """The format that a chat template tells its model to write calls in; None where it knows no tools."""
    if DSML in template:
        return "deepseek_v32"
    if CALL_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    return None
