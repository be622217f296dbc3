"""server/text/byte_text.py: bytes of tokens, beside the tokenizers library."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from support.texts import trained_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders

from npucompile.server.text.byte_text import ByteDetokenizer, TokenBytes, is_byte_level
from npucompile.server.text.tokenizer import TextTokenizer

NAMES = ["<think>", "</think>", "two words", "é", "日本", "Ġtail", " tail"]
"""Of added tokens; "é" and "Ġ" stand for a byte each, and a space and the kanji for none."""


@cache
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in NAMES])
    tokenizer.add_special_tokens(["<|end|>", "<|a special one|>"])
    return tokenizer


@given(st.lists(st.integers(0, tokenizer().get_vocab_size() + 5), max_size=60), st.booleans(), st.integers(1, 5))
def test_any_ids_have_the_text_that_the_library_gives_them(ids: list[int], skip_special: bool, step: int) -> None:
    stream = ByteDetokenizer(TokenBytes(tokenizer(), skip_special=skip_special))
    text = "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.flush()
    assert text == tokenizer().decode(ids, skip_special_tokens=skip_special)


def test_each_token_alone_has_the_text_that_the_library_gives_it() -> None:
    for skip_special in (True, False):
        table = TokenBytes(tokenizer(), skip_special=skip_special)
        for token in range(tokenizer().get_vocab_size() + 2):
            assert table[token].decode(errors="replace") == tokenizer().decode([token], skip_special_tokens=skip_special)


def test_only_byte_level_vocabularies_are_read_so() -> None:
    assert is_byte_level(tokenizer())
    other = Tokenizer.from_str(tokenizer().to_str())
    other.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert not is_byte_level(other)
    assert not isinstance(TextTokenizer(other).detokenizer(), ByteDetokenizer)
    assert isinstance(TextTokenizer(Tokenizer.from_str(tokenizer().to_str())).detokenizer(), ByteDetokenizer)
