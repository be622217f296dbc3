"""server/parsers/call_formats.py: calls as Qwen and DeepSeek models write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import written
from support.chat_templates import TEMPLATES
from support.parsing import Call, joined, pieces_of

from npucompile.server.parsers.call_formats import ALIASES, FORMATS, choose
from npucompile.server.parsers.tool_calls import CallBegin, CallEnd, ToolCallParser

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "at": {"type": "array"},
            "metric": {"type": ["boolean", "null"]},
            "code": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "where": {"type": "object"},
        },
    },
    "list_all": {},
    "other": {},
}
ARGUMENTS = {"city": "Zürich", "days": 2, "at": [1.5], "metric": True, "code": 12, "where": {"x": None}}


def parser(name):
    return ToolCallParser(FORMATS[name], TOOLS)


def call(name, arguments):
    return Call(name, arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name):
    text = f"I look.\n\n{written(name, ('weather', ARGUMENTS), ('list_all', {}))}"
    assert joined(parser(name), [text]) == ["I look.", call("weather", ARGUMENTS), call("list_all", {})]


VALUES = st.one_of(st.text("aé <>/\"'\\\n{}", max_size=6).map(str.strip), st.integers(-9, 9), st.booleans(), st.just([{"a": "</x>"}]))


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), before=st.sampled_from(["", "text\n\n", "<tool", "<｜"]), cut=st.integers(0, 30))
def test_pieces_do_not_matter(name, data, before, cut):
    arguments = data.draw(st.dictionaries(st.sampled_from(["city", "days", "at", "metric"]), VALUES, max_size=2))
    text = before + written(name, ("weather", arguments), ("other", {}))
    text = text[: len(text) - cut]
    assert joined(parser(name), data.draw(pieces_of(text))) == joined(parser(name), [text])


@given(arguments=st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=3))
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.arguments is None])
def test_any_json_is_read_back(name, arguments):
    assert joined(parser(name), [written(name, ("weather", arguments))]) == [call("weather", arguments)]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "whole"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b', False),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}', True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}', True),
        ("hermes", '<tool_call>{"arguments": {"a": [NaN, 1e999]}, "name": "f"}</tool_call>', '{"a": ["NaN", "1e999"]}', True),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b", '{"a": "b', False),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter>", '{"a": "b"', False),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter></function>", '{"a": "b"}', True),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter></tool_call>", '{"a": "b"}', True),
    ],
)
def test_a_call_is_whole_where_its_end_or_that_of_its_arguments_is_there(name, text, arguments, whole):
    reader = parser(name)
    parts = [*reader.push(text), *reader.finish()]
    assert parts[0] == CallBegin("f")
    assert "".join(part.text for part in parts[1:-1]) == arguments
    assert parts[-1] == CallEnd(whole)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("days", "12", 12),
        ("code", "12", 12),
        ("unknown", "12", "12"),
        ("city", "a\nb", "a\nb"),
    ],
)
def test_a_schema_says_what_a_value_in_tags_is(key, text, value):
    written = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert joined(parser("qwen3_coder"), [written]) == [call("weather", {key: value})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n[1]\n</tool_call>"),
        ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nwhat\n</function>\n</tool_call>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"),
        ("deepseek_v32", '<｜DSML｜invoke name="f">what</｜DSML｜invoke>'),
    ],
)
def test_what_is_no_call_stays_text(name, text):
    assert joined(parser(name), [text]) == [text]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": "{}", "name": "f"}</tool_call>', Call("f", {})),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', Call("f", '{"a": }')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "b', Call("f", '{"a": 1, "b')),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>1\n</function>\n</tool_call>", Call("f", {"a": "1"})),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
            [Call("f", {"a": ""}), "</parameter>\n</function>\n</tool_call>"],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n</tool_call> </fun\n</parameter>\n</function>\n</tool_call>",
            Call("f", {"a": "</tool_call> </fun"}),
        ),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBa", Call("weather", '{"city": "Ba')),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">{</｜DSML｜parameter></｜DSML｜invoke>',
            Call("f", {"a": "{"}),
        ),
    ],
)
def test_a_call_that_has_begun_stays_one(name, text, expected):
    assert joined(parser(name), [text]) == (expected if isinstance(expected, list) else [expected])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_sent_as_they_come(name):
    """Of a long text most is out before its end is."""
    text = written(name, ("weather", {"city": "x" * 50}))
    reader, sent = parser(name), []
    for character in text:
        sent += reader.push(character)
        if text.startswith("x" * 50, text.find("x" * 50)) and sum(len(part.text) for part in sent if hasattr(part, "text")) >= 40:
            break
    else:
        pytest.fail("nothing came before the end")
    assert isinstance(sent[0], CallBegin)
    assert sent[0].name == "weather"


def test_a_template_tells_its_format():
    assert {name: choose(template) for name, template in TEMPLATES.items()} == {
        "chatml": "hermes",
        "deepseek": "deepseek_v31",
        "rare": None,
    }
    assert choose("<tool_call> <function=x>") == "qwen3_coder"
    assert choose("<｜tool▁call▁begin｜> ```json") == "deepseek_v3"
    assert choose("<｜DSML｜invoke") == "deepseek_v32"
    # Models of Llama's that were trained for another format keep its turns.
    assert choose('<|start_header_id|> "parameters": <tool_call>') == "hermes"
    assert choose('<|start_header_id|> "parameters": ') == "llama3_json"
    assert choose("<tool_call>{name}<arg_key>{k}</arg_key>\n<arg_value>") == "glm45"
    assert set(ALIASES.values()) <= set(FORMATS)
