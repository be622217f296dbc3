import json
import shutil
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.tools.train import corpus, tiny_tokenizer
from npucompile.tools.train.corpus import Chapter, CorpusError, parse_chapters, split_chapters

PRINTED = """Ge1:1 In the beginning God created the heaven and the earth.
Ge1:2 And the earth was without form,  and void; and darkness was upon the face of the deep.
Ge2:1 Thus the heavens and the earth were finished, and all the host of them.
1Sm1:1 Now there was a certain man of Ramathaimzophim, (of mount Ephraim,) and his name was Elkanah.
"""
CHAPTERS = parse_chapters(PRINTED)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer.train_tokenizer((chapter.text for chapter in CHAPTERS), vocab_size=320)


def test_labels_are_dropped_and_verses_gathered():
    assert [chapter.name for chapter in CHAPTERS] == ["Ge 1", "Ge 2", "1Sm 1"]
    assert CHAPTERS[0].text == (
        "In the beginning God created the heaven and the earth. "
        "And the earth was without form, and void; and darkness was upon the face of the deep."
    )


@pytest.mark.parametrize("line, says", [("no label here", "label"), ("Ge1:2 second first", "verse 1"), ("Ge1:1 ", "label"), ("", "label")])
def test_malformed_lines_are_refused_by_number(line, says):
    with pytest.raises(CorpusError, match=f"line 2 .*{says}"):
        parse_chapters("Exo1:1 fine\n" + line + "\n")


def test_split_depends_on_position_alone():
    chapters = [Chapter("Ge", i, (f"verse {i}",)) for i in range(260)]
    training, held_out = split_chapters(chapters)
    assert [chapter.number for chapter in held_out] == [25, 75, 125, 175, 225]
    assert sorted(chapter.number for chapter in training + held_out) == list(range(260))


def test_missing_command_says_how_to_get_the_text(monkeypatch):
    monkeypatch.setattr(corpus, "COMMAND", ("no-such-command-here",))
    with pytest.raises(CorpusError, match="apt-get install bible-kjv"):
        corpus.read_bible()


def test_failing_command_is_reported(monkeypatch):
    monkeypatch.setattr(corpus, "COMMAND", ("sh", "-c", "echo no such book >&2; exit 3"))
    with pytest.raises(CorpusError, match="status 3: no such book"):
        corpus.read_bible()


@pytest.mark.skipif(shutil.which("bible") is None, reason="package bible-kjv is not installed")
def test_whole_text_parses():
    chapters = parse_chapters(corpus.read_bible())
    assert (len(chapters), sum(len(chapter.verses) for chapter in chapters)) == (1189, 31102)
    _, held_out = split_chapters(chapters)
    share = sum(len(c.text) for c in held_out) / sum(len(c.text) for c in chapters)
    assert len(held_out) == 24
    assert 0.015 < share < 0.025


def test_every_id_decodes_and_specials_are_last(tokenizer):
    assert tokenizer.get_vocab_size() <= 320
    size = tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(name) for name in tiny_tokenizer.SPECIALS] == [size - 3, size - 2, size - 1]
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(size))


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_saved_tokenizer_loads_in_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tiny_tokenizer.save_tokenizer(tokenizer, tmp_path, 2048)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe_text"}))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = CHAPTERS[0].text
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert loaded.eos_token == tiny_tokenizer.EOS
    assert loaded.apply_chat_template([{"role": "user", "content": "In the"}], tokenize=False) == "In the"


def test_stream_is_the_tokens_of_each_chapter_and_its_end(tokenizer):
    stream = tiny_tokenizer.TokenStream.of(tokenizer, CHAPTERS)
    eos = tokenizer.token_to_id(tiny_tokenizer.EOS)
    expected = [i for chapter in CHAPTERS for i in [*tokenizer.encode(chapter.text).ids, eos]]
    assert stream.ids.tolist() == expected


def test_window_begins_like_a_prompt_and_goes_on_like_the_text(tokenizer):
    stream = tiny_tokenizer.TokenStream.of(tokenizer, CHAPTERS)
    second = tokenizer.decode(stream.window(1, 200).tolist(), skip_special_tokens=False)
    rest = CHAPTERS[0].verses[1] + tiny_tokenizer.EOS + CHAPTERS[1].text + tiny_tokenizer.EOS + CHAPTERS[2].text
    assert second.startswith(rest[: len(second)])
    last = tokenizer.decode(stream.window(3, 400).tolist(), skip_special_tokens=False)
    assert last.startswith(CHAPTERS[2].text + tiny_tokenizer.EOS + CHAPTERS[0].text)
    assert all(len(stream.window(verse, length)) == length for verse in range(4) for length in (1, 5, 500))


def test_batches_repeat_with_their_seed(tokenizer):
    stream = tiny_tokenizer.TokenStream.of(tokenizer, CHAPTERS)
    first, again, other = (stream.batch(8, 12, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.shape == (8, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
