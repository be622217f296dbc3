"""server/text/tokenizer.py: the detokenizer and stop strings, over any split of the stream."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import TEXT, cut_at_stop, trained_tokenizer
from tokenizers import Tokenizer

from npucompile.graphs.errors import ModelError
from npucompile.server.text.token_text import REPLACEMENT, token_text
from npucompile.server.text.tokenizer import WINDOW_TOKENS, StopMatcher, TextTokenizer, WindowDetokenizer


@cache
def codec() -> TextTokenizer:
    return TextTokenizer(trained_tokenizer())


def split(items, cuts):
    """`items` in pieces, cut at `cuts` taken modulo the length; empty pieces included."""
    places = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in pairwise(places)] + [items[:0]]


def detokenizers():
    """Both kinds, of the same tokenizer."""
    return [codec().detokenizer(), WindowDetokenizer(codec().decode)]


CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@given(st.text(alphabet=st.sampled_from(TEXT + "xyz\n"), max_size=60), CUTS)
def test_valid_text_comes_back_in_whole_characters(text, cuts):
    ids = codec().encode(text)
    for stream in detokenizers():
        pieces = [stream.push(piece) for piece in split(ids, cuts)]
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert "".join(pieces) == text
        assert stream.flush() == ""


@given(st.lists(st.integers(0, 399), max_size=80), CUTS)
def test_any_ids_in_any_split_give_the_full_decoding(ids, cuts):
    for stream in detokenizers():
        text = "".join(stream.push(piece) for piece in split(ids, cuts)) + stream.flush()
        assert text == codec().decode(ids)


@cache
def byte_table() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for (the GPT-2 table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + i): value for i, value in enumerate(others)}


@cache
def byte_id(value: int) -> int:
    char = next(char for char, byte in byte_table().items() if byte == value)
    return codec().library.token_to_id(char)


@pytest.mark.parametrize("values", [[0xFF], [0xE4, 0xB8], [0xF0, 0x9F, 0x99], [0xFF, 0xE4, 0xB8], [0x80]])
def test_a_stream_of_garbage_keeps_a_small_window(values):
    ids = [byte_id(value) for value in values * 200]
    decoded = []

    def decode(token_ids):
        decoded.append(len(token_ids))
        return codec().decode(token_ids)

    stream = WindowDetokenizer(decode)
    text = "".join(stream.push([token]) for token in ids) + stream.flush()
    assert text == codec().decode(ids)
    assert max(decoded) <= WINDOW_TOKENS + 1


def test_special_tokens_are_silent_in_the_middle_of_a_character():
    first, *rest = [byte_id(value) for value in "é".encode()]
    for stream in detokenizers():
        assert stream.push([first]) + stream.push([0]) + stream.push(rest) == "é"


def test_context_of_earlier_tokens_is_kept():
    # A decoder that drops a leading space, as sentencepiece's do: a token alone and after others reads differently.
    words = {1: " in", 2: " the", 3: " end"}
    stream = WindowDetokenizer(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert [stream.push([i]) for i in (1, 2, 3, 2)] == ["in", " the", " end", " the"]


def test_encode_ignores_a_stored_truncation():
    tokenizer = Tokenizer.from_str(codec().library.to_str())
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=50)
    assert TextTokenizer(tokenizer).encode(TEXT) == codec().encode(TEXT)


def test_load_takes_file_or_directory(tmp_path):
    codec().library.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = TextTokenizer.load(path)
        assert loaded.decode(loaded.encode(TEXT)) == TEXT


def test_load_names_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is not a tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_the_text_of_a_token_is_that_of_token_text_and_is_looked_up_once():
    looked_up = []

    class Watched:
        no_truncation = no_padding = staticmethod(lambda: None)
        decoder = None
        id_to_token = staticmethod(codec().library.id_to_token)

        @staticmethod
        def decode(ids, skip_special_tokens):
            looked_up.append(ids)
            return codec().library.decode(ids, skip_special_tokens=skip_special_tokens)

    watched = TextTokenizer(Watched())
    for token in (0, 5, byte_id(0xC3), 0, 5):
        assert watched.token_text(token) == token_text(codec().library, token)
    assert looked_up == [[0], [5], [byte_id(0xC3)]]


# --- stop strings ---


STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


@given(st.text(alphabet="ab\n", max_size=40), STOPS, CUTS)
def test_any_split_cuts_where_the_oracle_cuts(text, stops, cuts):
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in split(text, cuts)) + matcher.flush()
    assert (sent, matcher.hit) == cut_at_stop(text, stops)


@given(st.text(alphabet="ab\n", max_size=20), STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    sent = ""
    for i, char in enumerate(text, start=1):
        sent += matcher.push(char)
        if matcher.hit:
            return
        pending = text[len(sent) : i]
        tails = [text[start:i] for start in range(i)]
        assert pending == next((tail for tail in tails if any(stop != tail and stop.startswith(tail) for stop in stops)), "")


def test_special_tokens_are_known_by_their_texts():
    assert codec().is_special("<|end|>")
    assert not codec().is_special("a")
    assert codec().decode([0], skip_special=False) == "<|end|>"
    assert codec().encode("<|end|>a", add_special=False)[0] == 0


def test_a_bad_word_has_the_spellings_that_vllm_forbids():
    """One at the beginning of a text; another one behind a space only if that changes its first token and not their number."""
    spelt = {word: codec().spellings(word) for word in ("the", " the", "x", "thezebra")}
    for word, spellings in spelt.items():
        plain, behind = codec().encode(word.strip()), codec().encode(f" {word.strip()}")
        assert spellings[0] == plain
        assert spellings[1:] == ((behind,) if len(behind) == len(plain) and behind[0] != plain[0] else ())
    assert spelt["the"] == spelt[" the"]
    assert {len(spellings) for spellings in spelt.values()} == {1, 2}
