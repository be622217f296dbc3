"""server/chat/reply_grammar.py: replies as models write them are legal, others are not, and what is legal is read back by the parsers."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import written
from support.grammars import EOS, SPECIAL, SPELT, TEXT, Vocabulary, vocabulary
from support.parsing import Call, joined

from npucompile.graphs.errors import RequestError
from npucompile.server.chat.reply_grammar import INSIDE, MAYBE, NONE, Reply, check_choice
from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.tool_calls import ToolCallParser
from npucompile.server.requests.structured_output import OutputFormat
from npucompile.server.requests.tool_fields import ToolUse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}},
}


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {}), **fields}}


TOOLS = (tool("weather", WEATHER, strict=True), tool("now"))
REQUIRED = ToolUse(TOOLS, "required")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BODY = OutputFormat("json_schema", SCHEMA, "response_format.schema")


@pytest.fixture(scope="module", params=[SPELT, TEXT, SPECIAL])
def known(request):
    """Vocabularies without marks, with marks as tokens that are not special, and as special ones."""
    return vocabulary(request.param)


def legal(known: Vocabulary, reply, text):
    """Whether a text is a whole reply, and whether it is the beginning of one, in the tokens that are its own, with each a draft."""
    tokens = known.ids(text)
    constraint = known.compiler.constraint("reply", reply, "tools")
    *before, last = known.masks(constraint, [], tokens)
    begins = all(token in mask for token, mask in zip(tokens, before, strict=True))
    assert known.masks(constraint, [])[0] == (before or [last])[0]
    return begins and EOS in last, begins


@pytest.mark.parametrize("form", FORMATS)
def test_calls_of_every_format_are_legal_and_nothing_else_is(known, form):
    full = {"city": "Zürich </x", "days": 2, "unit": "F", "where": {"x": 1.5}}
    one = written(form, ("weather", full))
    several = written(form, ("weather", {"city": "a"}), ("now", {}))
    required, single = Reply(NONE, REQUIRED, form), Reply(NONE, replace(REQUIRED, parallel=False), form)
    named = Reply(NONE, ToolUse(TOOLS, "required", "now"), form)
    assert legal(known, required, one) == legal(known, required, several) == legal(known, single, one) == (True, True)
    assert not legal(known, single, several)[1]
    assert (legal(known, named, written(form, ("now", {})))[0], legal(known, named, one)[1]) == (True, False)
    for wrong in ({"days": 2}, {"city": "a", "days": "x"}, {"city": "a", "unit": "K"}, {"city": "a", "other": 1}):
        assert not legal(known, required, written(form, ("weather", wrong)))[0]
    assert not legal(known, required, written(form, ("other", {})))[1]
    assert not legal(known, required, "I do not.")[1]
    assert not legal(known, required, one + "!")[1]


@pytest.mark.parametrize("form", FORMATS)
def test_free_text_may_come_before_calls_that_keep_to_their_schemas(known, form):
    auto = Reply(NONE, ToolUse(TOOLS), form)
    one = written(form, ("weather", {"city": "a"}))
    for text in ("I cannot < say.", one, f"I look.\n{one}", "I look.\n" + written(form, ("weather", {"city": "a"}), ("now", {}))):
        assert legal(known, auto, text)[0]
    assert not legal(known, auto, "I look.\n" + written(form, ("weather", {"days": 1})))[0]


@pytest.mark.parametrize(
    ("reasoning", "text", "whole"),
    [
        (NONE, '{"a": 1}', True),
        (NONE, '<think>x</think>{"a": 1}', False),
        (INSIDE, 'it is <1 or "{"\n</think>\n\n{"a": 1}', True),
        (INSIDE, '</think>{"a": 1}', True),
        (INSIDE, '{"a": 1}', False),
        (INSIDE, 'x</think>y</think>{"a": 1}', False),
        (MAYBE, '<think>\nx\n</think>\n\n{"a": 1}', True),
        (MAYBE, '{"a": 1}', True),
        (MAYBE, 'x</think>{"a": 1}', False),
    ],
)
@pytest.mark.parametrize("body", [BODY, OutputFormat("regex", r'\{"a": \d+\}', "x"), OutputFormat("choice", ['{"a": 1}'], "x")])
def test_structure_begins_behind_reasoning(known, reasoning, text, whole, body):
    assert legal(known, Reply(reasoning, body=body), text)[0] == whole


ODD = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 1}}, "y": {"type": "string"}}, "required": ["x"]}


@pytest.mark.parametrize("form", FORMATS)
def test_keywords_that_no_grammar_has_are_passed_over_unless_the_tool_is_strict_whatever_the_format(known, form):
    def reply(strict):
        return Reply(NONE, ToolUse((tool("f", ODD, strict=strict),), "required"), form)

    assert legal(known, reply(False), written(form, ("f", {"x": 2, "y": "a"})))[0]
    with pytest.raises(RequestError, match='"not"'):
        known.compiler.constraint("reply", reply(True), "tools")


def test_a_reply_with_a_structure_may_be_a_call_instead(known):
    reply = Reply(INSIDE, ToolUse(TOOLS), "hermes", BODY)
    assert legal(known, reply, "hm</think>\n" + written("hermes", ("now", {})))[0]
    assert legal(known, reply, 'hm</think>\n{"a": 1}')[0]
    assert not legal(known, reply, "hm</think>\nI do not know")[1]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("reasoning", "thought"), [(NONE, ""), (INSIDE, "hm\n</think>\n\n"), (MAYBE, "<think>\nhm\n</think>\n\n")])
def test_the_tokens_that_a_model_writes_are_never_masked(known, form, reasoning, thought):
    """Whatever marks are to the tokenizer, behind reasoning and text, in each call; masks behind drafts are those behind output."""
    calls = written(form, ("weather", {"city": "Zürich </x", "days": 2, "where": {"x": 1.5}}), ("now", {}))
    for choice, text in (("required", thought + calls), ("auto", f"{thought}I look.\n{calls}"), ("auto", f"{thought}I do not.")):
        assert known.follows(known.compiler.constraint("reply", Reply(reasoning, ToolUse(TOOLS, choice), form), "tools"), text)


@pytest.mark.parametrize("form", FORMATS)
def test_a_mark_that_is_spelt_out_is_a_mark(form):
    """Parsers read it as one: what follows keeps to the schemas even if it was not written as the tokenizer's own special token."""
    known, reply = vocabulary(SPECIAL), Reply(INSIDE, ToolUse(TOOLS), form)
    spelt = vocabulary(SPELT).ids("hm</think>" + FORMATS[form].first_mark)
    constraint = known.compiler.constraint("reply", reply, "tools")
    assert all(token in mask for token, mask in zip(spelt, known.masks(constraint, [], spelt), strict=False))
    assert not set(known.ids("Ixyz")) & known.masks(constraint, spelt)[0]


def test_names_of_users_are_no_marks():
    """A function or an argument that is named as a special token is spelt out, as its text has to come out."""
    known = vocabulary(SPECIAL)
    named = tool("<|im_end|>", {"type": "object", "properties": {"<|call|>": {"type": "string"}}, "required": ["<|call|>"]})
    for form in FORMATS:
        grammar = known.compiler._grammar("reply", Reply(NONE, ToolUse((named,), "required"), form), "tools")
        numbers = {int(number) for number in re.findall(r"<\[(\d+)\]>", grammar)}
        assert not numbers & {*known.ids("<|im_end|>"), *known.ids("<|call|>")}
        assert "<|im_end|>" in grammar


@given(st.integers(0, 2**32), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=25, deadline=None)
def test_any_walk_along_the_masks_is_a_call_that_the_parser_reads(known, seed, form):
    """Arguments of lists alone, so that a walk comes to its end."""
    schema = {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["C", "F"]}, "on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    use = ToolUse((tool("set", schema), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})), "required")
    constraint = known.compiler.constraint("reply", Reply(NONE, replace(use, parallel=False), form), "tools")
    draw, output = random.Random(seed), []
    for _ in range(400):
        (legal_tokens,) = known.masks(constraint, output)
        token = draw.choice(sorted(legal_tokens))
        if token == EOS:
            break
        output.append(token)
    else:
        pytest.fail("no end")
    (call,) = joined(ToolCallParser(FORMATS[form], {"set": schema, "now": {}}), [known.text(output)])
    assert isinstance(call, Call)
    assert call.name in ("set", "now")
    if call.name == "set":
        assert call.arguments["on"] in (True, False)
        assert call.arguments.get("unit", "C") in ("C", "F")


@pytest.mark.parametrize(
    ("use", "calls", "param", "words"),
    [
        (ToolUse((), "required"), "hermes", "tool_choice", "no tools"),
        (ToolUse(TOOLS, "required", "other"), "hermes", "tool_choice", "'other'"),
        (ToolUse(TOOLS, "required"), None, "tool_choice", "--tool-call-parser"),
        (ToolUse(TOOLS), None, "tools", "--tool-call-parser"),
        (ToolUse((tool("f"),), parallel=False), None, "tools", "--tool-call-parser"),
    ],
)
def test_what_nothing_can_make_is_refused(use, calls, param, words):
    with pytest.raises(RequestError) as caught:
        check_choice(use, calls)
    assert caught.value.param == param
    assert words in str(caught.value)
