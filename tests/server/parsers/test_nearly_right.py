"""Calls that models write nearly right, most of which vLLM's parsers read too: each is a call or text, and nothing is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import Call, joined, pieces_of

from npucompile.server.chat.format import ChatFormat
from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.reasoning import Content, Reasoning
from npucompile.server.parsers.tool_calls import CallArguments, CallBegin

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "t": {"type": "string"}, "y": {"type": "string"}}}
SCHEMAS = {"f": SCHEMA, "g": SCHEMA, "l": {"type": "object", "properties": {"t": {"type": "array"}}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
CLOSED, OPEN = "<think>\n\n</think>\n\n", "<think>\n"
F = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
G = "<function=g>\n<parameter=t>\na b\n</parameter>\n</function>"
ONE, OTHER = Call("f", {"x": 1}), Call("g", {"t": "a b"})
JSON_F, JSON_G = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {"t": "a b"}}'
X, T = "<parameter=x>\n1\n", "<parameter=t>\na b\n"
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def parse(form, prompt, pieces, tools=TOOLS):
    parser = ChatFormat(None, "qwen3", form).parser(prompt, tools)
    return joined(parser, pieces)


TAGGED = [
    ("the end mark alone is missing", f"<tool_call>\n{F}", [ONE]),
    ("without marks", F, [ONE]),
    ("without the first mark", f"So:\n{F}\n</tool_call>", [Content("So:"), ONE]),
    ("without marks, text behind", f"{F}\nDone.", [ONE, Content("Done.")]),
    ("two without marks", f"{F}\n{G}", [ONE, OTHER]),
    ("without arguments", "<function=f>\n</function>", [Call("f", {})]),
    ("two in one block", f"<tool_call>\n{F}\n{G}\n</tool_call>", [ONE, OTHER]),
    ("three, and text", f"<tool_call>\n{F}\n{F}\n{G}\nok\n</tool_call>\nbye", [ONE, ONE, OTHER, Content("ok\nbye")]),
    ("an end mark is missing between two", f"<tool_call>\n{F}\n<tool_call>\n{G}\n</tool_call>", [ONE, OTHER]),
    ("a first mark is missing between two", f"<tool_call>\n{F}\n</tool_call>\n{G}\n</tool_call>", [ONE, OTHER]),
    ("a parameter without its end", f"<tool_call>\n<function=f>\n{X}{T}</parameter>\n</function>\n</tool_call>",
     [Call("f", {"x": 1, "t": "a b"})]),
    ("a text without its end", f"<tool_call>\n<function=f>\n{T}{X}</parameter>\n</function>\n</tool_call>",
     [Call("f", {"t": "a b", "x": 1})]),
    ("the last one without its end", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>", [ONE]),
    ("the last one of the first of two", f"<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n{G}\n</tool_call>", [ONE, OTHER]),
    ("neither its end nor the function's", "<tool_call>\n<function=g>\n<parameter=t>\na b\n</tool_call>", [OTHER]),
    ("neither, and another call", f"<tool_call>\n<function=g>\n{T}</tool_call>\n<tool_call>\n{F}\n</tool_call>", [OTHER, ONE]),
    ("text between arguments", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\nhm\n</function>\n</tool_call>",
     [ONE, Content("hm\n</function>")]),
    ("text about tags", "Write <function=name> and <function=f> there.", [Content("Write <function=name> and <function=f> there.")]),
    ("text about tags, then a call", f"As <function=f> does:\n<tool_call>\n{F}\n</tool_call>", [Content("As <function=f> does:"), ONE]),
    ("an unknown function without marks", "<function=h>\n</function>", [Content("<function=h>\n</function>")]),
    ("a value that speaks of tags", "<tool_call>\n<function=g>\n<parameter=t>\n<parameter=z> </function> x </tool_call> y\n</parameter>\n"
     "</function>\n</tool_call>", [Call("g", {"t": "<parameter=z> </function> x </tool_call> y"})]),
]  # fmt: skip

JSON = [
    ("parameters", '<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>', [ONE]),
    ("parameters first", '<tool_call>\n{"parameters": {"x": 1}, "name": "f"}\n</tool_call>', [ONE]),
    ("two in one block", f"<tool_call>\n{JSON_F}\n{JSON_G}\n</tool_call>", [ONE, OTHER]),
    ("two with a comma", f"<tool_call>\n{JSON_F},\n{JSON_G}\n</tool_call>", [ONE, Content(f",\n{JSON_G}")]),
    ("a list", f"<tool_call>\n[{JSON_F}, {JSON_G}]\n</tool_call>", [ONE, OTHER]),
    ("an end mark is missing between two", f"<tool_call>\n{JSON_F}\n<tool_call>\n{JSON_G}\n</tool_call>", [ONE, OTHER]),
    ("text behind it", f"<tool_call>\n{JSON_F} so\n</tool_call>", [ONE, Content("so")]),
    ("an outer bracket is missing", '<tool_call>\n{"name": "f", "arguments": {"x": 1}\n</tool_call>', [ONE]),
    ("arguments by another name", '<tool_call>\n{"name": "f", "args": {"x": 1}}\n</tool_call>',
     [Content('<tool_call>\n{"name": "f", "args": {"x": 1}}\n</tool_call>')]),
    ("both names", '<tool_call>\n{"arguments": {"x": 1}, "parameters": {}, "name": "f"}\n</tool_call>',
     [Content('<tool_call>\n{"arguments": {"x": 1}, "parameters": {}, "name": "f"}\n</tool_call>')]),
    ("without marks it is text", JSON_F, [Content(JSON_F)]),
]  # fmt: skip

OTHERS = [
    ("deepseek_v31", f'{BEGIN}f{SEP}{{"x": 1}} so{END}', [ONE, Content("so")]),
    ("deepseek_v31", f'{BEGIN}f{SEP}{{"x": 1}}{BEGIN}g{SEP}{{"t": "a b"}}{END}', [ONE, OTHER]),
    ("deepseek_v3", f'{BEGIN}function{SEP}f\n```json\n{{"x": 1}}\n```{BEGIN}function{SEP}g\n```json\n{{"t": "a b"}}\n```{END}',
     [ONE, OTHER]),
    ("deepseek_v32", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">1<｜DSML｜parameter name="t" string="true">a b'
     "</｜DSML｜parameter>\n</｜DSML｜invoke>", [Call("f", {"x": 1, "t": "a b"})]),
]  # fmt: skip

KX, KT = "<arg_key>x</arg_key>\n<arg_value>1</arg_value>", "<arg_key>t</arg_key><arg_value>a b</arg_value>"
GLM = [
    ("with line breaks", f"<tool_call>f\n{KX}\n</tool_call>", [ONE]),
    ("the name on a line of its own", f"<tool_call>\nf\n{KX}\n</tool_call>", [ONE]),
    ("two, and text", f"So:\n<tool_call>f{KX}</tool_call><tool_call>g{KT}</tool_call>\nok", [Content("So:"), ONE, OTHER, Content("ok")]),
    ("without arguments", "<tool_call>f</tool_call><tool_call>g\n</tool_call>", [Call("f", {}), Call("g", {})]),
    ("no tool", "<tool_call>and</tool_call>", [Content("<tool_call>and</tool_call>")]),
    ("an unknown tool", f"<tool_call>h{KT}</tool_call>", [Call("h", {"t": "a b"})]),
    ("the end mark is missing", f"<tool_call>f{KX}", [ONE]),
    ("an end mark is missing between two", f"<tool_call>f{KX}<tool_call>g{KT}</tool_call>", [ONE, OTHER]),
    ("a value without its end", f"<tool_call>f<arg_key>y</arg_key><arg_value>a{KX}</tool_call>", [Call("f", {"y": "a", "x": 1})]),
    ("the last one without its end", "<tool_call>g<arg_key>t</arg_key><arg_value>a b</tool_call>", [OTHER]),
    ("a value that speaks of tags", f"<tool_call>g{KT}</tool_call>".replace("a b", "a</arg_value> b </tool_call> <arg_key>"),
     [Call("g", {"t": "a</arg_value> b </tool_call> <arg_key>"})]),
    ("a text that looks like a number", "<tool_call>f<arg_key>t</arg_key><arg_value>1</arg_value></tool_call>", [Call("f", {"t": "1"})]),
]  # fmt: skip

SECTION, ENDED = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_F = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
KIMI_G = '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"t": "a b"}<|tool_call_end|>'
KIMI = [
    ("blanks at the marks", f"So: {SECTION} {KIMI_F}\n{KIMI_G} {ENDED} ok", [Content("So:"), ONE, OTHER, Content("ok")]),
    ("without a section", f"{KIMI_F}{KIMI_G}", [ONE, OTHER]),
    ("the end marks are missing", (SECTION + KIMI_F + KIMI_G).replace("<|tool_call_end|>", ""), [ONE, OTHER]),
    ("without what is before the name", f"{SECTION}{KIMI_F}{ENDED}".replace("functions.", ""), [ONE]),
    ("without arguments", f"{SECTION}{KIMI_F}{ENDED}".replace('{"x": 1}', ""), [Call("f", {})]),
    ("marks in an argument", f"{SECTION}{KIMI_G}{ENDED}".replace("a b", ENDED + "<|tool_call_end|>"),
     [Call("g", {"t": ENDED + "<|tool_call_end|>"})]),
    ("a name alone", "<|tool_call_begin|>functions.f:0<|tool_call_end|>",
     [Content("<|tool_call_begin|>functions.f:0<|tool_call_end|>")]),
]  # fmt: skip

INVOKE, INVOKED = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
PX, PT = '<parameter name="x">1</parameter>\n', '<parameter name="t">a b</parameter>\n'
MINIMAX_F, MINIMAX_G = f'<invoke name="f">\n{PX}</invoke>', f'<invoke name="g">\n{PT}</invoke>'
MINIMAX = [
    ("several in one block", f"So:\n{INVOKE}{MINIMAX_F}\n{MINIMAX_G}{INVOKED}\nok", [Content("So:"), ONE, OTHER, Content("ok")]),
    ("without a block", f"{MINIMAX_F}\n{MINIMAX_G}", [ONE, OTHER]),
    ("without line breaks", f"{INVOKE}{MINIMAX_F}{INVOKED}".replace("\n", ""), [ONE]),
    ("an unknown tool", f"{INVOKE}{MINIMAX_F}{INVOKED}".replace('"f"', '"h"'), [Call("h", {"x": "1"})]),
    ("an unknown tool that is none without a block", 'As <invoke name="h">\n</invoke>.', [Content('As <invoke name="h">\n</invoke>.')]),
    ("a value that speaks of tags", f"{INVOKE}{MINIMAX_G}{INVOKED}".replace("a b", "a</parameter>b</invoke>c"),
     [Call("g", {"t": "a</parameter>b</invoke>c"})]),
    ("a tag in a string of a value that is JSON",
     f'{INVOKE}<invoke name="l"><parameter name="t">["</parameter>"]</parameter></invoke>{INVOKED}', [Call("l", {"t": ["</parameter>"]})]),
    ("one that is none before another", f'{INVOKE}<invoke name="g">what</invoke>\n{MINIMAX_F}{INVOKED}',
     [Content('<invoke name="g">what</invoke>'), ONE]),
    ("a parameter without its end", f'{INVOKE}<invoke name="f">\n<parameter name="t">a{PX}</invoke>{INVOKED}',
     [Call("f", {"t": "a", "x": 1})]),
]  # fmt: skip

LLAMA_F, LLAMA_G = '{"name": "f", "parameters": {"x": 1}}', '{"name": "g", "parameters": {"t": "a b"}}'
LLAMA = [
    ("alone", LLAMA_F, [ONE]),
    ("behind its tag", f"<|python_tag|>{LLAMA_F}", [ONE]),
    ("two", f"{LLAMA_F}; {LLAMA_G}", [ONE, OTHER]),
    ("two on lines, text around", f"So:\n{LLAMA_F}\n{LLAMA_G}\nok", [Content("So:"), ONE, OTHER, Content("ok")]),
    ("with a type", LLAMA_F.replace('{"name', '{"type": "function", "name'), [ONE]),
    ("arguments", LLAMA_F.replace("parameters", "arguments"), [ONE]),
    ("without arguments", '{"name": "f"} ok', [Call("f", {}), Content("ok")]),
    ("no tool", '{"name": "h", "parameters": {"x": 1}}', [Content('{"name": "h", "parameters": {"x": 1}}')]),
    ("a tool that is not called", '[{"name": "f", "is": 1}, {"b": 2}]', [Content('[{"name": "f", "is": 1}, {"b": 2}]')]),
    ("a program", "<|python_tag|>print(1)", [Content("print(1)")]),
    ("cut in its name", '{"name": "f', [Content('{"name": "f')]),
]  # fmt: skip

ARGS_F, ARGS_G = '[TOOL_CALLS]f[ARGS]{"x": 1}', '[TOOL_CALLS]g[ARGS]{"t": "a b"}'
MISTRAL = [
    ("a list", f"So:[TOOL_CALLS][{JSON_F}, {JSON_G}]", [Content("So:"), ONE, OTHER]),
    ("a list with blanks, and text", f"[TOOL_CALLS] [ {JSON_F} ,{JSON_G} ] ok", [ONE, OTHER, Content("ok")]),
    ("arguments first", '[TOOL_CALLS][{"arguments": {"x": 1}, "name": "f"}]', [ONE]),
    ("names and arguments", ARGS_F + ARGS_G, [ONE, OTHER]),
    ("with an id", ARGS_F.replace("[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]"), [ONE]),
    ("without the mark of arguments", ARGS_F.replace("[ARGS]", ""), [ONE]),
    ("a mark in an argument", ARGS_G.replace("a b", ARGS_F.replace('"', "'")), [Call("g", {"t": ARGS_F.replace('"', "'")})]),
    ("no call", "[TOOL_CALLS]what", [Content("[TOOL_CALLS]what")]),
]  # fmt: skip

CASES = [
    *((form, *case) for form in ("glm45", "glm47") for case in GLM),
    *(("kimi_k2", *case) for case in KIMI),
    *(("minimax_m2", *case) for case in MINIMAX),
    *(("llama3_json", *case) for case in LLAMA),
    *((form, *case) for form in ("mistral", "mistral_args") for case in MISTRAL),
    *(("qwen3_coder", *case) for case in TAGGED),
    *(("hermes", *case) for case in JSON),
    *((form, form, *rest) for form, *rest in OTHERS),
]


@pytest.mark.parametrize(("form", "name", "text", "expected"), CASES, ids=[f"{form}: {name}" for form, name, _, _ in CASES])
def test_what_is_nearly_a_call_is_one_or_is_text(form, name, text, expected):
    assert parse(form, CLOSED, [text]) == expected
    # Token by token, and character by character, it is the same.
    assert parse(form, CLOSED, list(text)) == expected


@pytest.mark.parametrize("form", ["qwen3_coder", "hermes"])
@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("I need f.\n{}", [Reasoning("I need f."), ONE]),
        ("{}", [ONE]),
        ("I need f.\n{}\nLet me see.", [Reasoning("I need f."), ONE, Content("Let me see.")]),
        ("I need f.\n{}\n{}", [Reasoning("I need f."), ONE, ONE]),
        ("I could {}\n</think>\n\nNo.", None),
        ("I could {}\n</think>\n\n{}", None),
        ("I know <tool_call> well.", [Reasoning("I know <tool_call> well.")]),
        ("I know <tool_call> and </tool_call> well.\n", [Reasoning("I know <tool_call> and </tool_call> well.\n")]),
    ],
)
def test_a_call_within_thinking_that_is_not_closed_is_one(form, around, expected):
    call = f"<tool_call>\n{F if form == 'qwen3_coder' else JSON_F}\n</tool_call>"
    text = around.replace("{}", call)
    if expected is None:
        expected = [Reasoning(f"I could {call}"), Content("No.") if "No." in around else ONE]
    for pieces in ([text], list(text)):
        assert parse(form, OPEN, pieces) == expected
    assert parse(form, OPEN, [text], tools=())[0] == (
        Reasoning(text) if "</think>" not in text else Reasoning(f"I could {call}"))  # fmt: skip


@pytest.mark.parametrize(("form", "calls"), [("glm45", f"<tool_call>f\n{KX}\n</tool_call>"), ("glm47", f"<tool_call>f{KX}</tool_call>"),
                                              ("kimi_k2", f"{SECTION}{KIMI_F}{ENDED}"), ("kimi_k2", KIMI_F)])  # fmt: skip
@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("I need f.\n{}", [Reasoning("I need f."), ONE]),
        ("{}", [ONE]),
        ("I need f.\n{}\nLet me see.", [Reasoning("I need f."), ONE, Content("Let me see.")]),
        ("I need f.\n</think>{}", [Reasoning("I need f."), ONE]),
        ("I need f.\n</think>\n\nSo:\n{}", [Reasoning("I need f."), Content("So:"), ONE]),
        (
            "I know <tool_call> and <|tool_calls_section_begin|>.\n{}",
            [Reasoning("I know <tool_call> and <|tool_calls_section_begin|>."), ONE],
        ),
    ],
)
def test_reasoning_ends_where_a_call_begins_if_the_format_says_so(form, calls, around, expected):
    text = around.replace("{}", calls)
    for pieces in ([text], list(text)):
        assert parse(form, OPEN, pieces) == expected
    # It is told as it is written, and without tools all is reasoning.
    assert CallBegin("f") in [CallBegin(part.name) for part in ChatFormat(None, "qwen3", form).parser(OPEN, TOOLS).push(text[:-3])
                              if isinstance(part, CallBegin)]  # fmt: skip
    assert parse(form, OPEN, [text], tools=())[0] == Reasoning(text.partition("</think>")[0].rstrip() if "</think>" in text else text)


def test_ids_that_a_model_writes_are_told_once():
    parser = ChatFormat(None, None, "kimi_k2").parser("", TOOLS)
    parts = [*parser.push(f"{SECTION}{KIMI_F}{KIMI_G}{KIMI_F}{ENDED}"), *parser.finish()]
    assert [part.call_id for part in parts if isinstance(part, CallBegin)] == ["functions.f:0", "functions.g:1", None]


def test_a_call_that_is_cut_within_thinking_is_told_as_far_as_it_was_written():
    parser = ChatFormat(None, "qwen3", "qwen3_coder").parser(OPEN, TOOLS)
    parts = [*parser.push("hm\n<tool_call>\n<function=g>\n<parameter=t>\na"), *parser.finish()]
    assert [part for part in parts if not isinstance(part, CallArguments)][:2] == [Reasoning("hm"), CallBegin("g")]
    assert not parts[-1].whole
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"t": "a'


WORDS = {
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "<function=h>", "</function>", "<parameter=x>", "<parameter=t>",
                    "<parameter=z>", "</parameter>", "\n", " ", "<", "</"],
    "hermes": ["<tool_call>", "</tool_call>", JSON_F, JSON_G, '{"name": "f", "parameters": {',
               '"x": 1', "}", "[", "]", ",", '"', "\n", " ", "<"],
    "glm47": ["<tool_call>", "</tool_call>", "f", "h", "<arg_key>", "x", "t", "</arg_key>", "<arg_value>", "</arg_value>", KX, KT, "\n",
              " ", "<", "</"],
    "kimi_k2": [SECTION, ENDED, "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", KIMI_F, KIMI_G,
                '{"x": 1', "}", '"', "<|", "\n", " "],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', '<invoke name="h">', "</invoke>",
                   '<parameter name="x">', '<parameter name="t">', "</parameter>", MINIMAX_F, '["', '"]', "\n", " ", "<", "</"],
    "llama3_json": ["<|python_tag|>", LLAMA_F, LLAMA_G, "\n", " ", '{"name": "', 'f"', 'h"', ', "parameters": ', "{", '"x": 1', "}",
                    ";", ","],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[", "]", JSON_F, "f", '{"x": 1', "}", ",", '"', "[TOOL", "\n", " "],
}  # fmt: skip
SAID = re.compile(r"w\d")


@pytest.mark.parametrize("form", WORDS)
@given(data=st.data())
def test_nothing_that_was_written_is_lost_and_pieces_do_not_matter(form, data):
    """Words among marks and halves of calls: each is in the reasoning, the text, or the arguments of a call, once and in order."""
    words = data.draw(st.lists(st.sampled_from([*WORDS[form], "</think>", "w"]), max_size=14))
    text = "".join(f"w{place % 10}" if word == "w" else word for place, word in enumerate(words))
    prompt = data.draw(st.sampled_from([OPEN, CLOSED]))
    assert parse(form, prompt, data.draw(pieces_of(text))) == parse(form, prompt, [text])
    parser = ChatFormat(None, "qwen3", form).parser(prompt, TOOLS)
    told = "".join(getattr(part, "text", getattr(part, "name", "")) for part in [*parser.push(text), *parser.finish()])
    assert SAID.findall(told) == SAID.findall(text)


def test_formats_are_all_here():
    assert {form for form, *_ in CASES} == set(FORMATS)
