"""server/parsers/reasoning.py: reasoning and answer of whole texts, and of the same texts in any pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.parsers.reasoning import PARSERS, Content, Reasoning, ReasoningParser, choose, names, reasoning_parser

PIECES = ["<think>", "</think>", "<thi", "</th", "\n", " ", "a", "b <", ">"]


def parse(parser, pieces):
    """Reasoning and answer of a text in pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text for part in parts)
    kinds = [kind for kind, _ in itertools.groupby(map(type, parts))]
    assert kinds in ([], [Reasoning], [Content], [Reasoning, Content])
    return tuple("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content))


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nhm\n</think>\n\nyes\n", ("hm", "yes\n")),
        (False, "\n<think>hm", ("hm", "")),
        (False, " no reasoning </think> here", ("", " no reasoning </think> here")),
        (False, "a <think>b</think>", ("", "a <think>b</think>")),
        (False, "<think>\n\n</think>\n\nyes", ("", "yes")),
        (True, "hm\n\nhm </think>yes </think>", ("hm\n\nhm", "yes </think>")),
        (True, "<think>\nhm</think> yes", ("hm", "yes")),
        (True, "hm </thin", ("hm </thin", "")),
        (False, "<thin", ("", "<thin")),
        (True, "", ("", "")),
        (True, "\n</think>", ("", "")),
    ],
)
def test_a_text_has_reasoning_and_an_answer(inside, text, expected):
    assert parse(ReasoningParser(inside), [text]) == expected
    assert parse(ReasoningParser(inside), text) == expected


@given(inside=st.booleans(), words=st.lists(st.sampled_from(PIECES), max_size=10), data=st.data())
def test_pieces_do_not_matter(inside, words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(ReasoningParser(inside), pieces) == parse(ReasoningParser(inside), [text])


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", ("", "a</think>b")),
        ("qwen3", "<|im_start|>assistant\n<think>\n", ("a", "b")),
        ("qwen3", "<think>\n\n</think>\n\n", ("", "a</think>b")),
        ("deepseek_r1", "<｜Assistant｜>", ("a", "b")),
        ("deepseek_r1", "<｜Assistant｜></think>", ("", "a</think>b")),
        ("deepseek_v3", "<｜Assistant｜>", ("", "a</think>b")),
        ("deepseek_v3", "<｜Assistant｜><think>", ("a", "b")),
    ],
)
def test_the_prompt_says_where_the_text_begins(name, prompt, expected):
    assert parse(reasoning_parser(name, prompt), ["a</think>b"]) == expected


def test_a_template_that_closes_reasoning_has_some():
    assert choose("{% if x %}</think>{% endif %}") == "qwen3"
    assert choose("{{ messages }}") is None
    assert set(PARSERS) < set(names())
