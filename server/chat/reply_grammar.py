"""The grammar of a whole reply: reasoning first, then free text, tool calls or structured output, as the model's formats write them.

Grammars are in llguidance's dialect of Lark. Text up to a mark is a lazy lexeme that ends with it, so that it holds the mark nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...graphs.errors import RequestError
from ..parsers.call_formats import FORMATS
from ..parsers.reasoning import CLOSE, OPEN
from ..parsers.schemas import MAX_SHAPES, Schemas
from ..parsers.tool_calls import CallFormat, TaggedArguments
from ..requests.fields import show
from ..requests.json_blanks import OPTIONS, with_blanks
from ..requests.structured_output import OutputFormat
from ..requests.tool_fields import AUTO, REQUIRED, ToolUse

NONE, INSIDE, MAYBE = "none", "inside", "maybe"
"""Whether a reply begins with reasoning: not at all, within it already, or as the model likes."""

Special = Mapping[str, int]
"""Ids of special tokens by their text. Marks that are other tokens are text to a grammar, which has those tokens."""

ANY_TEXT = "/(?s:.*)/"
FEW_BLANKS = r"/[ \t\r\n]{0,8}/"
"""What may stand between reasoning and a form: models write two line breaks."""
NUMBER = "/[0-9]{1,4}/"


@dataclass(frozen=True)
class Reply:
    """What a reply must be.

    Attributes:
        reasoning: NONE, INSIDE or MAYBE.
        tools: and whether they are called.
        calls: name of the format of calls (`parsers.call_formats.FORMATS`); None where none may come.
        body: what the text must be where there is no call; None leaves it free.
    """

    reasoning: str
    tools: ToolUse = field(default_factory=ToolUse)
    calls: str | None = None
    body: OutputFormat | None = None

    def grammar(self, special: Special, body: str | None = None) -> str:
        """The grammar, in llguidance's notation; `body` is that of the body."""
        writer = _Writer(special)
        parts = []
        if self.calls is not None:
            parts.append(writer.calls(self.calls, self.tools, free_text=self.tools.choice == AUTO and body is None))
        if self.tools.choice == AUTO or self.calls is None:
            parts.append(ANY_TEXT if body is None else "@body")
        writer.rules["reply"] = " | ".join(f"({part})" for part in parts)
        writer.rules["start"] = f"{writer.thinking(self.reasoning)} reply"
        if self.calls is not None and FORMATS[self.calls].ends_reasoning and self.reasoning != NONE:
            begin = writer.opened() if self.reasoning == MAYBE else ""
            writer.rules["start"] += f" | {begin} {writer.up_to('called', FORMATS[self.calls].first_mark)} calls"
        lark = "".join(f"{name}: {rule}\n" for name, rule in sorted(writer.rules.items(), key=lambda rule: rule[0] != "start"))
        grammars: list[dict[str, Any]] = [{"name": "reply", "lark_grammar": lark}]
        if body is not None:
            grammars.append(_named(body, "body"))
        return json.dumps({"grammars": grammars})


class _Writer:
    """Writes rules; in those that it returns, marks that are special tokens are tokens, and all else is text."""

    def __init__(self, special: Special) -> None:
        self._marks = {mark: number for mark, number in special.items() if mark in FORMAT_TEXT}
        self._mark = re.compile("(" + ("|".join(map(re.escape, self._marks)) or "(?!)") + ")")
        self.rules: dict[str, str] = {}

    def thinking(self, reasoning: str) -> str:
        if reasoning == NONE:
            return ""
        thought = f"{self.up_to('thought', CLOSE)} {FEW_BLANKS}"
        return thought if reasoning == INSIDE else f"({self.opened()} {thought})?"

    def opened(self) -> str:
        """What begins reasoning that the prompt has not begun; some models break the line first."""
        return f"/\\n?/ {self.text(OPEN)}"

    def up_to(self, name: str, mark: str) -> str:
        """Any text up to a mark, and the mark: with its token, or all spelt out, which parsers read as the same."""
        self.rules[f"{name}[suffix={_quoted(mark)}]"] = ANY_TEXT
        before, *rest = self._mark.split(mark, maxsplit=1)
        if not rest:
            return name
        self.rules[name.upper()] = f"{ANY_TEXT} {_quoted(before)}" if before else ANY_TEXT
        return f"({name} | {name.upper()} {self.text(''.join(rest))})"

    def text(self, text: str) -> str:
        """A text of a format, whose marks are tokens where they are special ones."""
        return " ".join(f"<[{self._marks[part]}]>" if part in self._marks else _quoted(part) for part in self._mark.split(text) if part)

    def calls(self, name: str, use: ToolUse, *, free_text: bool) -> str:
        """One call, or several, behind free text where it may come first."""
        form = FORMATS[name]
        functions = [self._function(form, index, tool) for index, tool in enumerate(use.callable)]
        self.rules["function"] = " | ".join(functions)
        mark, (opened, closed) = form.first_mark, form.brackets or ("", "")
        first = self.text((form.before + form.begin).removeprefix(mark) + opened)
        begin = self.text(form.between + ("" if form.brackets else form.begin))
        # Where marks alone may follow and begin alike, llguidance would cut their common beginning into other tokens.
        another = begin if form.between else f"/\\n?/ {begin}"
        more = f"({another} function {self.text(form.end)})*" if use.parallel else ""
        self.rules["calls"] = f"{first} function {self.text(form.end)} {more} {self.text(closed + form.after)}"
        return f"{self.up_to('told', mark) if free_text else self.text(mark)} calls"

    def _function(self, form: CallFormat, index: int, tool: Mapping[str, Any]) -> str:
        schema = tool.get("parameters") or {}
        head, tail = form.head(tool["name"]), form.tail
        rule = f"function{index}"
        guidance = {} if tool.get("strict") else {"lenient": True}
        if form.arguments is None:
            arguments = _json({"type": "object", **schema}, guidance)
        else:
            own = schema.get(OPTIONS, {})
            arguments = self._tagged(form.arguments, tool["name"], schema, {**guidance, **own} if isinstance(own, Mapping) else guidance)
        number = f"{NUMBER} {self.text(form.numbered)}" if form.numbered else ""
        self.rules[rule] = f"{self.text(head)} {number} {self._rule(f'arguments{index}', arguments)} {self.text(tail)}"
        return rule

    def _rule(self, name: str, expression: str) -> str:
        if not expression.strip():
            return ""
        self.rules[name] = expression
        return name

    def _tagged(self, form: TaggedArguments, function: str, root: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
        """All arguments in tags, in the order of the schema; of alternatives, each."""
        schemas = Schemas(root)
        shapes = schemas.shapes()
        if len(shapes) > MAX_SHAPES:
            message = f"the parameters of {function!r} have more than {MAX_SHAPES} alternatives; legal are at most that many"
            raise RequestError(message, param="tools", code="invalid_grammar")
        alternatives = dict.fromkeys(
            " ".join(
                f"({self._argument(form, name, value, schemas, guidance)}){'' if name in shape.required else '?'}"
                for name, value in shape.properties.items()
                if value is not False
            )
            for shape in shapes
        )
        return " | ".join(f"({alternative})" for alternative in alternatives) if any(alternatives) else ""

    def _argument(self, form: TaggedArguments, name: str, schema: Any, schemas: Schemas, guidance: Mapping[str, Any]) -> str:
        """One argument in its tags: a text is any up to the closing tag, or one of those that the schema lists."""
        values = schemas.values(schema)
        opening = self.text(form.open(name, values.is_text))
        closing = self.text(form.close)
        if values.is_text and values.options:
            return f"{opening} ({' | '.join(_quoted(option) for option in values.options)}) {closing}"
        if values.is_text:
            mark = form.close.rstrip("\n")
            return f"{opening} {self.up_to('text', mark)} {self.text(form.close.removeprefix(mark))}"
        return f"{opening} {_json(schemas.standalone(schema), guidance)} {closing}"


def _json(schema: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    """JSON of a schema; `guidance` says how llguidance reads it where the schema does not say it itself."""
    own = schema.get(OPTIONS, {})
    return "%json " + json.dumps(with_blanks({**schema, OPTIONS: {**guidance, **own} if isinstance(own, Mapping) else own}))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


FORMAT_TEXT = "".join((OPEN, CLOSE, *(form.text for form in FORMATS.values())))
"""All that formats write by themselves: names of functions and arguments that spell a special token are text."""


def _named(grammar: str, name: str) -> dict[str, Any]:
    """A grammar in llguidance's notation, which is Lark or a list of one, under a name."""
    if not grammar.lstrip().startswith("{"):
        return {"name": name, "lark_grammar": grammar}
    (inner,) = json.loads(grammar)["grammars"]
    return {**inner, "name": name}


def check_choice(use: ToolUse, calls: str | None) -> None:
    """Raises RequestError where a request wants calls that nothing can make."""
    wants = use.choice == REQUIRED
    if wants and not use.offered:
        message = f"tool_choice is {use.named or use.choice!r} and there are no tools; legal is tools beside it"
        raise RequestError(message, param="tool_choice")
    names = {tool["function"]["name"]: None for tool in use.tools}
    for name in (use.named, *(use.allowed or ())):
        if name is not None and name not in names:
            message = f"tool_choice names {show(name)}, and tools are {show(list(names))}; legal is one of them"
            raise RequestError(message, param="tool_choice")
    if use.constrains and calls is None:
        message = (
            "the chat template shows no format of tool calls, which tool_choice, parallel_tool_calls: false and strict functions need; "
            "legal is a server started with --tool-call-parser"
        )
        raise RequestError(message, param="tool_choice" if wants else "tools", code="unsupported_value")
