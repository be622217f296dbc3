"""server/chat_format.py: which parsers a template gets."""

from __future__ import annotations

import pytest
from support.chat_templates import CHATML, DEEPSEEK, RARE
from support.parsing import Call, whole

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.chat_format import ChatFormat
from npucompile.server.chat_template import Chat, ChatTemplate
from npucompile.server.parsers.reasoning import Content, Reasoning
from npucompile.server.reply_grammar import INSIDE, MAYBE, NONE, ToolUse
from npucompile.server.structured_output import OutputFormat

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (CHATML, {}, ("qwen3", "hermes")),
        (DEEPSEEK, {}, ("qwen3", "deepseek_v31")),
        (RARE, {}, (None, None)),
        (CHATML, {"reasoning_parser": "none", "tool_call_parser": "none"}, (None, None)),
        (CHATML, {"reasoning_parser": "deepseek-r1", "tool_call_parser": "qwen3_xml"}, ("deepseek_r1", "qwen3_coder")),
    ],
)
def test_parsers_are_those_of_the_template_or_as_named(text, options, expected):
    form = ChatFormat.of(ChatTemplate(text), **options)
    assert (form.reasoning, form.tool_calls) == expected


def test_without_a_template_nothing_is_parsed_or_rendered():
    form = ChatFormat.of(None)
    assert (form.reasoning, form.tool_calls) == (None, None)
    with pytest.raises(RequestError, match="--chat-template FILE") as caught:
        form.render(Chat([{"role": "user", "content": "a"}]))
    assert caught.value.code == "chat_template_missing"


@pytest.mark.parametrize("options", [{"reasoning_parser": "x"}, {"tool_call_parser": "x"}])
def test_an_unknown_parser_is_named(options):
    with pytest.raises(SpecError, match="no parser 'x'; legal are auto, none, "):
        ChatFormat.of(None, **options)


def test_a_completion_is_read_as_its_prompt_says():
    form = ChatFormat.of(ChatTemplate(CHATML), tool_call_parser="qwen3_coder")
    text = "hm</think><tool_call><function=f><parameter=a>1</parameter></function></tool_call>"

    def parse(prompt, tools):
        parser = form.parser(prompt, tools)
        return whole([*parser.push(text), *parser.finish()])

    assert parse("a<think>\n", TOOLS) == [Reasoning("hm"), Call("f", {"a": 1})]
    assert parse("a<think>\n", ()) == [Reasoning("hm"), Content(text.removeprefix("hm</think>"))]
    assert parse("a", ()) == [Content(text)]


@pytest.mark.parametrize(("test", "expected"), [("", "system"), ("{% if m.role == 'developer' %}{% endif %}", "developer")])
def test_a_developer_speaks_as_the_system_where_the_template_does_not_know_one(test, expected):
    form = ChatFormat(ChatTemplate("{% for m in messages %}{{ m.role }}" + test + "{% endfor %}"))
    assert form.render(Chat([{"role": "developer", "content": "a"}])) == expected


def test_marks_are_those_that_are_looked_for():
    form = ChatFormat.of(ChatTemplate(DEEPSEEK))
    assert form.marks(tools=False) == ("<think>", "</think>")
    assert "<｜tool▁calls▁begin｜>" in form.marks(tools=True)
    assert ChatFormat().marks(tools=True) == ()


@pytest.mark.parametrize(
    ("end", "continues", "reasoning"),
    [("<think>\n", False, INSIDE), ("<think>\n\n</think>\n\n", False, NONE), ("assistant\n", False, MAYBE), ("I am", True, NONE)],
)
def test_a_structure_waits_for_reasoning_that_the_prompt_has_not_closed(end, continues, reasoning):
    form, wanted = ChatFormat.of(ChatTemplate(CHATML)), OutputFormat("json_object", None, "response_format")
    reply = form.reply(f"a{end}", ToolUse(), wanted, continues=continues)
    assert (reply is wanted) == (reasoning == NONE)
    if reply is not wanted:
        assert (reply.value.reasoning, reply.value.body, reply.param) == (reasoning, wanted, "response_format")
    assert form.reply(f"a{end}", ToolUse(tuple(TOOLS)), None, continues=continues) is None
    assert form.reply(f"a{end}", ToolUse(tuple(TOOLS), "required"), None, continues=continues).value.calls == "hermes"
