"""tools/train/tiny_tokenizer.py: every text survives, every id decodes, windows are what a prompt would be."""

import json
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from npucompile.graphs.errors import SpecError
from npucompile.tools.train import tiny_tokenizer
from npucompile.tools.train.corpus import Chapter

VERSES = (
    ("In the beginning was a tiny model.", "And the model was without form."),
    ("And they traced the model, and saw that it was static.", "And there was a bucket."),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer.train_tokenizer([" ".join(verses) for verses in VERSES] * 4, 300)


def chapters() -> list[Chapter]:
    return [Chapter("Tiny", i, verses) for i, verses in enumerate(VERSES)]


def test_specials_are_the_last_three_and_every_id_decodes(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(s) for s in tiny_tokenizer.SPECIALS] == [size - 3, size - 2, size - 1]
    assert tiny_tokenizer.eos_id(tokenizer) == size - 3
    for i in range(size):
        assert tokenizer.decode([i], skip_special_tokens=False) != ""


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Z")), max_size=40))
def test_text_survives(text: str) -> None:
    found = tiny_tokenizer.train_tokenizer(["a b"], 270)
    assert found.decode(found.encode(text).ids) == unicodedata.normalize("NFC", text)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no token '<\|endoftext\|>'"):
        tiny_tokenizer.eos_id(Tokenizer(models.BPE()))


def test_saved_files_name_the_specials(tokenizer: Tokenizer, tmp_path) -> None:
    tiny_tokenizer.save_tokenizer(tokenizer, tmp_path, 64)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode("the model").ids == tokenizer.encode("the model").ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["model_max_length"]) == (tiny_tokenizer.EOS, 64)


def test_a_stream_is_its_chapters_and_windows_begin_at_verses(tokenizer: Tokenizer) -> None:
    stream = tiny_tokenizer.TokenStream.of(tokenizer, chapters())
    text = tokenizer.decode(stream.ids.tolist(), skip_special_tokens=False)
    assert text == "".join(" ".join(verses) + tiny_tokenizer.EOS for verses in VERSES)
    for verse, words in enumerate(v for verses in VERSES for v in verses):
        window = stream.window(verse, 60)
        assert window.shape == (60,)
        assert tokenizer.decode(window.tolist(), skip_special_tokens=False).startswith(words[:20])
    batch = stream.batch(5, 12, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 12)
    assert {tuple(row) for row in batch.tolist()} <= {tuple(stream.window(v, 12).tolist()) for v in range(4)}
