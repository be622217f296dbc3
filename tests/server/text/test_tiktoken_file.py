"""server/text/tiktoken_file.py: ids and texts are those of tiktoken, and what is not Kimi's is refused."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from support import kimi_texts
from support.kimi_texts import CODE, PIECES, write_tokenizer

from npucompile.graphs.errors import ModelError
from npucompile.server.text import tiktoken_file
from npucompile.server.text.tokenizer import TextTokenizer

COUNT = 1000
CHARS = "的一是中国々〇〆 aBcXYZ'’sTLLſ…\n\r\t \u3000\u00a0123४½🙂👩‍👧éÜßǅ日本語ひらカナ한국ไท\u0301\u200d«»—_{}[]();:<|>#/*"
WORDS = (
    "<|im_end|>", "<|im_user|>", "<think>", "<|reserved_token_1003|>", "[BOS]", "don't", "WE'LL", "it'S", "    ", "\n\n", " \n ",
    "def f(x):\n\treturn x  # no", "，你好", "1234567", "人工智能AI", "😀😀", "the heaven", "The", "<|im_", "'", "ﬁ",
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(st.sampled_from(CHARS), max_size=12), st.text(max_size=8)), max_size=12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiktoken.Encoding, TextTokenizer, Path]:
    directory = tmp_path_factory.mktemp("kimi")
    return write_tokenizer(directory, COUNT), TextTokenizer.load(directory), directory


@given(TEXTS)
def test_ids_and_texts_are_those_of_tiktoken(pair, parts):
    theirs, ours, _ = pair
    text = "".join(parts)
    ids = theirs.encode(text, allowed_special="all")
    assert list(ours.encode(text)) == list(ours.encode(text, add_special=False)) == ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text
    assert b"".join(ours.token_text(token).data for token in ids) == text.encode()


@given(st.text(st.sampled_from("etaonh \n")), st.integers(1, 40))
def test_long_runs_of_few_letters_merge_alike(pair, letters, times):
    theirs, ours, _ = pair
    assert list(ours.encode(letters * times)) == theirs.encode(letters * times)


def test_every_assigned_character_is_split_alike(pair):
    """Characters that no version of Unicode has assigned are letters to neither; those of the newest may be to one alone."""
    theirs, ours, _ = pair
    chars = [char for char in map(chr, range(0x110000)) if unicodedata.category(char) not in ("Cn", "Cs", "Co")]
    assert len(chars) > 100_000
    for begin in range(0, len(chars), 20_000):
        text = "".join(f"a{char}B 1{char}'s{char} " for char in chars[begin : begin + 20_000])
        assert list(ours.encode(text)) == theirs.encode(text, disallowed_special=())


@given(st.lists(st.integers(0, COUNT + kimi_texts.RESERVED - 1), max_size=60), st.data())
def test_a_stream_in_any_split_is_the_text_of_tiktoken(pair, ids, data):
    theirs, ours, _ = pair
    stream, sent, text = ours.detokenizer(skip_special=False), 0, ""
    while sent < len(ids):
        size = data.draw(st.integers(1, 7))
        text, sent = text + stream.push(ids[sent : sent + size]), sent + size
    assert text + stream.flush() == theirs.decode(ids)


def test_marks_are_tokens_of_their_own_and_the_special_ones_alone_are_left_out(pair):
    theirs, ours, _ = pair
    named = {place: token for place, token in ours.library.get_added_tokens_decoder().items()}
    assert {token.content: place for place, token in named.items()} == theirs._special_tokens
    assert {token.content for token in named.values() if not token.special} == {"<think>", "</think>", *_section()}
    text = "<|im_user|>user<|im_middle|>Hi<|im_end|><think>so</think><|tool_call_begin|>"
    assert ours.decode(ours.encode(text)) == "userHi<think>so</think><|tool_call_begin|>"
    assert ours.is_special("<|im_end|>")
    assert not ours.is_special("<think>")


def _section() -> tuple[str, ...]:
    return tuple(f"<|tool_call{mark}|>" for mark in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end"))


def test_the_tokenizer_json_of_an_artifact_says_the_same(pair, tmp_path):
    theirs, ours, directory = pair
    assert ours.added
    (tmp_path / "tokenizer.json").write_text(ours.library.to_str())
    again, text = TextTokenizer.load(tmp_path), Path(__file__).read_text(encoding="utf-8")
    assert list(again.encode(text)) == theirs.encode(text, allowed_special="all")
    assert again.library.to_str() == TextTokenizer.load(directory / "tiktoken.model").library.to_str()
    assert not again.added
    # How short a prompt can be is known of both.
    assert again.fewest_tokens(text) == ours.fewest_tokens(text) > 100


def test_the_pattern_is_the_published_one() -> None:
    assert "|".join(PIECES) == tiktoken_file.PATTERN


@pytest.mark.parametrize(
    "named",
    [
        {"auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}},
        {"auto_map": {"AutoTokenizer": ["moonshotai/Kimi-K2-Instruct--tokenization_kimi.TikTokenTokenizer", None]}},
    ],
)
def test_a_class_is_known_however_it_is_named(tmp_path, named):
    write_tokenizer(tmp_path, 300, **named)
    (tmp_path / "tokenization_kimi.py").unlink()
    assert TextTokenizer.load(tmp_path).decode([72]) != ""


REFUSALS = [
    ({"auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}}, "tokenizer is tokenization_other.TikTokenTokenizer; "
     "legal is tokenization_kimi.TikTokenTokenizer, a tokenizer.json beside it, or token ids alone without this file"),
    ({"auto_map": None, "tokenizer_class": "TiktokenWrapper"}, "its tokenizer is TiktokenWrapper; legal is tokenization_kimi"),
    ({"auto_map": None, "tokenizer_class": None}, "its tokenizer is of no class; legal is tokenization_kimi"),
    ({"added_tokens_decoder": {"7": {"content": "<x>"}}}, "the token '<x>' is 7 where"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSALS)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, changes, message):
    write_tokenizer(tmp_path, 300, **changes)
    with pytest.raises(ModelError) as refusal:
        TextTokenizer.load(tmp_path)
    assert message in str(refusal.value)


@pytest.mark.parametrize("code", [CODE.replace("{1,3}", "{1,2}"), "pat_str = made()", "pass", "def f(:\n", "pat_str = 3", "(" * 999])
def test_another_pattern_is_refused_and_nothing_of_the_checkpoint_is_run(tmp_path, code):
    write_tokenizer(tmp_path, 300)
    (tmp_path / "tokenization_kimi.py").write_text(code)
    with pytest.raises(ModelError, match=r"tokenization_kimi\.py splits texts by .*; legal is .*, a tokenizer\.json"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [*lines, "~~~ 300"], "expected lines of a token in base64 and its rank"),
        (lambda lines: [*lines, "QUFB"], "expected lines of a token in base64 and its rank"),
        (lambda lines: [*lines, "QUFBQUFB 299"], "has 301 lines and not each of the ranks from 0 to 300"),
        (lambda lines: [*lines, lines[4].partition(" ")[0] + " 300"], "has 301 lines and not each of the ranks from 0 to 300"),
        (lambda lines: [line.replace(lines[65].partition(" ")[0] + " ", "QUFBQUFB ") for line in lines], "and 1 of 256 are absent"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, change, message):
    write_tokenizer(tmp_path, 300)
    file = tmp_path / "tiktoken.model"
    file.write_text("\n".join(change(file.read_text().splitlines())))
    with pytest.raises(ModelError, match=message):
        TextTokenizer.load(tmp_path)


def test_a_tokenizer_json_beside_it_comes_first(tmp_path, pair):
    write_tokenizer(tmp_path, 300, tokenizer_class="Other", auto_map=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    (tmp_path / "tokenizer.json").write_text(pair[1].library.to_str())
    assert TextTokenizer.load(tmp_path).library.get_vocab_size() == COUNT + kimi_texts.RESERVED
