"""server/grammar/tokens.py: special tokens alone are no text, and forced text is cut into tokens that spell just that text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammars import EOS, MARKS, SPECIAL, SPELT, TEXT, masks_of, vocabulary
from support.texts import word_pieces

from npucompile.server.grammar.compiler import GrammarCompiler
from npucompile.server.grammar.tokens import GrammarTokens, by_number

# In its decomposed form, which the tokenizer's normaliser composes.
PIECES = st.sampled_from(
    [*MARKS, "<|im_end|>", "<|endoftext|>", "e\N{COMBINING ACUTE ACCENT}", "\N{ANGSTROM SIGN}", " a", "b ", "\n", "日本", "🙂"]
)


@pytest.mark.parametrize("kind", [SPELT, TEXT, SPECIAL])
@given(pieces=st.lists(PIECES, max_size=5))
@settings(max_examples=40)
def test_tokens_of_a_text_spell_it(kind, pieces):
    known = vocabulary(kind)
    tokens, text = GrammarTokens(known.tokenizer, [EOS]), "".join(pieces)
    found = tokens(text)
    assert b"".join(tokens.tokens[number] for number in found).decode() == text
    assert not set(found) & set(tokens.special_token_ids)


def test_special_tokens_and_ends_are_no_text():
    end = vocabulary(TEXT).ids("</think>")[0]
    tokens = GrammarTokens(vocabulary(TEXT).tokenizer, [EOS, end])
    assert [tokens(mark) for mark in MARKS if mark != "</think>"] == [vocabulary(TEXT).ids(mark) for mark in MARKS if mark != "</think>"]
    assert {EOS, end} <= set(tokens.special_token_ids)
    assert not {vocabulary(TEXT).ids(mark)[0] for mark in MARKS if mark != "</think>"} & set(tokens.special_token_ids)
    assert {vocabulary(SPECIAL).ids(mark)[0] for mark in MARKS} <= set(
        GrammarTokens(vocabulary(SPECIAL).tokenizer, [EOS]).special_token_ids
    )


@pytest.mark.parametrize("text", ["a cab", "<mark> é", " </s>", "🙂"])
def test_a_vocabulary_of_word_pieces_has_its_texts_too(text):
    """As Llama 2's: blanks are another character, and bytes without a token have names."""
    tokenizer = word_pieces("<mark>")
    compiler = GrammarCompiler(tokenizer, [tokenizer.token_to_id("</s>")])
    output: list[int] = []
    while (legal := masks_of(compiler.constraint("choice", [text]), tokenizer.get_vocab_size(), output)[0]) != {
        tokenizer.token_to_id("</s>")
    }:
        output.append(min(legal))
    names = [tokenizer.id_to_token(token) for token in output]
    spelt = b"".join(bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("▁", " ").encode() for name in names)
    assert spelt.decode() == text
    assert names[0] == "<mark>" or not text.startswith("<mark>")


@pytest.mark.parametrize(
    ("lark", "numbered"),
    [
        ("start: <think> /x/ </think>", "start: <[0]> /x/ <[1]>"),
        ('start: "<think>" /<think>[<>]/ <think> // <think>', 'start: "<think>" /<think>[<>]/ <[0]> // <think>'),
        ('start: "a\\"<think>" # <think>\n | <think>', 'start: "a\\"<think>" # <think>\n | <[0]>'),
        ("start: <|im_end|> <unknown> <[7]>", "start: <|im_end|> <unknown> <[7]>"),
        ('root ::= "a" <think>', 'root ::= "a" <think>'),
    ],
)
def test_names_of_tokens_become_numbers_where_they_are_no_text(lark, numbered):
    known = vocabulary(TEXT)
    for place, mark in enumerate(("<think>", "</think>")):
        numbered = numbered.replace(f"[{place}]", f"[{known.ids(mark)[0]}]")
    assert by_number(lark, known.tokenizer) == numbered
