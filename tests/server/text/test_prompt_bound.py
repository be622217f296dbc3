"""server/text/prompt_bound.py: no text has fewer tokens than its length says, and where that cannot be known nothing is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import TEXT, byte_tokenizer, trained_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from npucompile.server.text.prompt_bound import chars_per_token
from npucompile.server.text.tokenizer import TextTokenizer


def composing():
    tokenizer = trained_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, trained_tokenizer, composing])
@given(st.data())
def test_no_text_has_fewer_tokens(make, data):
    tokenizer = TextTokenizer(make())
    # Characters that compose to one (UAX 15: no canonical decomposition is longer), words of the vocabulary, and anything.
    pieces = st.sampled_from(["ᾂ", "\u03b1\u0313\u0300\u0345", "e\u0301", "<|end|>", " the", *TEXT.split()]) | st.text(max_size=5)
    text = "".join(data.draw(st.lists(pieces, max_size=30)))
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_is_the_longest_token():
    assert chars_per_token(byte_tokenizer()) == 1
    tokenizer = trained_tokenizer()
    longest = max(map(len, tokenizer.get_vocab()))
    assert chars_per_token(tokenizer) == longest
    assert TextTokenizer(tokenizer).fewest_tokens("x" * (3 * longest + 1)) == 4
    assert chars_per_token(composing()) == 4 * longest


def losing_whitespace():
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    return tokenizer


def removing():
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    return tokenizer


def stripping():
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def swallowing():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    return tokenizer


def unknown():
    return Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [losing_whitespace, removing, stripping, swallowing, unknown])
def test_where_characters_may_be_lost_there_is_no_bound(make):
    assert chars_per_token(make()) is None
    assert TextTokenizer(make()).fewest_tokens("x" * 10**6) == 0
