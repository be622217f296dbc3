"""server/chat/format.py: which parsers a template gets."""

from __future__ import annotations

import pytest
from support.chat_templates import CHATML, DEEPSEEK, RARE
from support.parsing import Call, whole

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.reply_grammar import INSIDE, MAYBE, NONE
from npucompile.server.chat.template import Chat, ChatTemplate
from npucompile.server.parsers.reasoning import PARSERS, Content, Reasoning, ReasoningParser
from npucompile.server.requests.structured_output import OutputFormat
from npucompile.server.requests.tool_fields import ToolUse

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
    ("end", "so_far", "reasoning"),
    [
        ("<think>\n", "", INSIDE),
        ("<think>\n\n</think>\n\n", "", NONE),
        ("assistant\n", "", MAYBE),
        ("assistant\n", " \n", MAYBE),
        ("I am", "I am", NONE),
        ("<think>\nI am", "<think>\nI am", INSIDE),
        ("<think>\nI am\n</think>\n\nNo", "<think>\nI am\n</think>\n\nNo", NONE),
        ("I know </think>", "I know </think>", NONE),
    ],
)
def test_a_structure_waits_for_reasoning_that_the_prompt_has_not_closed(end, so_far, reasoning):
    form, wanted = ChatFormat.of(ChatTemplate(CHATML)), OutputFormat("json_object", None, "response_format")
    reply = form.reply(f"a{end}", ToolUse(), wanted, so_far=so_far)
    assert (reply is wanted) == (reasoning == NONE)
    if reply is not wanted:
        assert (reply.value.reasoning, reply.value.body, reply.param) == (reasoning, wanted, "response_format")
    assert form.reply(f"a{end}", ToolUse(tuple(TOOLS)), None, so_far=so_far) is None
    assert form.reply(f"a{end}", ToolUse(tuple(TOOLS), "required"), None, so_far=so_far).value.calls == "hermes"


@pytest.mark.parametrize(("kind", "value"), [("regex", "so</think>yes"), ("choice", ["a</think>b"])])
def test_a_form_that_closes_reasoning_is_one_of_all_that_is_left_of_a_message(kind, value):
    form, wanted = ChatFormat.of(ChatTemplate(CHATML)), OutputFormat(kind, value, "structured_outputs")
    assert form.reply("a<think>\nb", ToolUse(), wanted, so_far="<think>\nb") is wanted


MESSAGE = "<think>\nFirst I look, and then <some> more.\n</think>\n\nThe answer </i> is\n\n42."
CUTS = [cut for cut in range(len("<think>"), len(MESSAGE) + 1) if not 0 < cut - MESSAGE.index("</think>") < len("</think>")]


def read(parser, text):
    parts = [*parser.push(text), *parser.finish()]
    return [part for part in parts if part.text]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_message_that_is_continued_is_read_as_if_it_had_come_at_once(name, cut):
    so_far, rest = MESSAGE[:cut], MESSAGE[cut:]
    parts = [
        *read(ReasoningParser(False), so_far),
        *read(ChatFormat(None, name).parser(f"assistant\n{so_far}", so_far=so_far), rest),
    ]
    for kind in (Reasoning, Content):
        whole = "".join(part.text for part in read(ReasoningParser(False), MESSAGE) if isinstance(part, kind))
        assert "".join(part.text for part in parts if isinstance(part, kind)).strip() == whole


@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_without_reasoning_goes_on_as_an_answer(name):
    parser = ChatFormat(None, name).parser("assistant\nThe answer is", so_far="The answer is")
    assert [*parser.push(" 42. <think>"), *parser.finish()] == [Content(" 42. <think>")]


ONE_ALONE = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('once') }}{% endif %}{#
#}<{{ m.role }}>{{ m.content if m.content is string else m.content | map(attribute='text') | join }}{% endfor %}"""
FIRST_ALONE = "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def say(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("template", "expected"),
    [(ONE_ALONE, "<system>a\n\nb<user>c"), (FIRST_ALONE, "<system>a\n\nb<user>c"), (EACH, "<system>a<system>b<user>c")],
)
def test_messages_of_the_system_that_come_first_are_one_where_the_template_has_one_place(template, expected):
    form = ChatFormat(ChatTemplate(template))
    assert form.render(Chat([say("system", "a"), say("developer", "b"), say("user", "c")])) == expected
    assert form.render(Chat([say("system", "a"), say("user", "c")])) == expected.replace("\n\nb", "").replace("<system>b", "")


def test_a_developer_whom_the_template_knows_is_joined_where_it_would_be_left_out():
    known = ChatFormat(ChatTemplate("{% set m = messages[0] %}{# developer #}<{{ m.role }}>{{ m.content }}<{{ messages[-1].content }}>"))
    assert known.render(Chat([say("system", "a"), say("developer", "b"), say("user", "c")])) == "<system>a\n\nb<c>"


def test_parts_of_several_messages_of_the_system_come_in_order():
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "d"}]
    form = ChatFormat(ChatTemplate(ONE_ALONE))
    assert form.render(Chat([say("system", "a"), say("system", parts), say("user", "c")])) == "<system>a\n\nbd<user>c"


@pytest.mark.parametrize(
    ("template", "later"), [(ONE_ALONE, "<user>d<user>e"), (FIRST_ALONE, "<user>d<user>e"), (EACH, "<system>d<user>e")]
)
def test_one_that_comes_later_is_the_users_where_the_template_has_no_place_for_it(template, later):
    """As coding agents write where what they may do changes, and behind a summary of what came before."""
    messages = [say("system", "a"), say("user", "b"), say("assistant", "c"), say("developer", "d"), say("user", "e")]
    assert ChatFormat(ChatTemplate(template)).render(Chat(messages)) == f"<system>a<user>b<assistant>c{later}"


def test_what_the_template_refuses_all_the_same_is_refused_in_its_words():
    check = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}"
    alternating = f"{{% for m in messages %}}{check}{{% endfor %}}"
    with pytest.raises(RequestError, match="by turns"):
        ChatFormat(ChatTemplate(alternating)).render(Chat([say("user", "a"), say("system", "b"), say("user", "c")]))


SWITCHED = "{% if enable_thinking is defined and enable_thinking is false %}{% endif %}"
DEEPSEEKS = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"


@pytest.mark.parametrize(
    ("text", "effort", "given", "expected"),
    [
        (SWITCHED, "none", {}, {"enable_thinking": False}),
        *((SWITCHED, effort, {}, {"enable_thinking": True}) for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
        (SWITCHED, "high", {"enable_thinking": False}, {"enable_thinking": False}),
        (SWITCHED, None, {}, {}),
        (DEEPSEEKS, "none", {}, {"thinking": False}),
        (DEEPSEEKS, "low", {}, {"thinking": True}),
        (SWITCHED + "{{ reasoning_effort }}", "low", {}, {"reasoning_effort": "low"}),
    ],
)
def test_an_effort_is_what_the_template_can_do_about_it(text, effort, given, expected):
    assert ChatFormat(ChatTemplate(text)).variables(given, effort, "reasoning_effort") == expected


@pytest.mark.parametrize(
    "text", ["{{ messages }}", "{% for m in messages %}{{ m.thinking }}{% set thinking = m.thinking %}{{ thinking }}{% endfor %}"]
)
def test_an_effort_is_refused_where_the_template_can_do_nothing(text):
    with pytest.raises(RequestError, match="no such setting"):
        ChatFormat(ChatTemplate(text)).variables({}, "low", "reasoning_effort")
