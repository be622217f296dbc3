"""server/text/token_text.py: the text and the bytes of single tokens; bytes of consecutive tokens add up to their text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import TEXT, trained_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from npucompile.server.text.token_text import BYTE_OF_CHAR, REPLACEMENT, TokenText, token_text


@cache
def byte_level() -> Tokenizer:
    tokenizer = trained_tokenizer()
    tokenizer.add_tokens([AddedToken("<｜in▁it｜>"), AddedToken("<0xE4>")])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    vocab = {"a": 0, **{f"<0x{value:02X}>": value + 1 for value in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@given(st.text(alphabet=st.sampled_from(TEXT + "xyz\n") | st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_of_tokens_in_a_row_are_those_of_their_text(text):
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text).ids
        assert b"".join(token_text(tokenizer, token).data for token in ids) == text.encode()


def test_every_byte_has_a_token_that_says_so():
    tokenizer = byte_level()
    data = [token_text(tokenizer, tokenizer.token_to_id(char)).data for char in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(data) == [bytes([value]) for value in range(256)]
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))


def test_a_part_of_a_character_is_shown_by_the_replacement_character():
    first, *_ = byte_level().encode("𝔛").ids
    assert REPLACEMENT in token_text(byte_level(), first).text
    assert token_text(byte_level(), first).data == "𝔛".encode()[: len(token_text(byte_level(), first).data)]
    assert token_text(byte_fallback(), 0xF0 + 1) == TokenText(REPLACEMENT, b"\xf0")


@pytest.mark.parametrize("name", ["<|end|>", "<｜in▁it｜>", "<0xE4>"])
def test_added_tokens_have_their_own_text(name):
    # A vocabulary with byte fallback would mean one byte by the last of them.
    assert token_text(byte_level(), byte_level().token_to_id(name)) == TokenText(name, name.encode())


def test_an_id_that_no_token_has_is_empty():
    assert token_text(byte_level(), 10**6) == TokenText("", b"")
