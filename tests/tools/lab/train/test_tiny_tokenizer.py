"""tools/lab/train/tiny_tokenizer.py: every text survives, every id decodes, and windows begin as prompts do."""

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from npucompile.graphs.errors import SpecError
from npucompile.tools.lab.train import tiny_tokenizer
from npucompile.tools.lab.train.corpus import Chapter

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
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no token '<\|endoftext\|>'"):
        tiny_tokenizer.eos_id(Tokenizer(models.BPE()))


def test_saved_files_load_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiny_tokenizer.save_tokenizer(tokenizer, tmp_path, 64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe_text"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = " ".join(VERSES[0])
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.model_max_length) == (tiny_tokenizer.EOS, 64)
    assert loaded.apply_chat_template([{"role": "user", "content": "In the"}], tokenize=False) == "In the"


def test_a_stream_is_its_chapters_and_windows_begin_at_verses(tokenizer: Tokenizer) -> None:
    stream = tiny_tokenizer.TokenStream.of(tokenizer, chapters())
    text = tokenizer.decode(stream.ids.tolist(), skip_special_tokens=False)
    assert text == "".join(" ".join(verses) + tiny_tokenizer.EOS for verses in VERSES)
    for verse, words in enumerate(v for verses in VERSES for v in verses):
        window = stream.window(verse, 60)
        assert window.shape == (60,)
        assert tokenizer.decode(window.tolist(), skip_special_tokens=False).startswith(words[:20])
    # A window goes on over the ends of chapters and of the text.
    texts = [" ".join(verses) + tiny_tokenizer.EOS for verses in VERSES]
    second, last = (tokenizer.decode(stream.window(verse, 60).tolist(), skip_special_tokens=False) for verse in (1, 3))
    assert second.startswith(VERSES[0][1] + tiny_tokenizer.EOS + texts[1])
    assert last.startswith(VERSES[1][1] + tiny_tokenizer.EOS + texts[0])
    eos = tokenizer.token_to_id(tiny_tokenizer.EOS)
    assert stream.ids.tolist() == [i for chapter in chapters() for i in [*tokenizer.encode(chapter.text).ids, eos]]
    assert all(len(stream.window(verse, length)) == length for verse in range(4) for length in (1, 5, 500))


def test_batches_are_windows_and_repeat_with_their_seed(tokenizer: Tokenizer) -> None:
    stream = tiny_tokenizer.TokenStream.of(tokenizer, chapters())
    first, repeated, other = (stream.batch(8, 12, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.shape == (8, 12)
    assert {tuple(row) for row in first.tolist()} <= {tuple(stream.window(v, 12).tolist()) for v in range(4)}
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
