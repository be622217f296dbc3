"""server/text/added_tokens.py: ids of texts are those of transformers, wherever a token is added that tokenizer.json lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from npucompile.graphs.errors import ModelError
from npucompile.server.text.tokenizer import TextTokenizer

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w3"}
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
TEXTS = ("w1 <x1> w2", "w1<x1>w2 <x2>", "  <x2>  w4 w3 <x1><x2>", "w2 X1 w33")


def directory(path: Path, **files: Any) -> Path:
    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w3"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>"])
    library.save(str(path / "tokenizer.json"))
    for name, values in {"tokenizer_config": CONFIG, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "decoder": {"tokenizer_config": {**CONFIG, "added_tokens_decoder": {"41": {"content": "<x1>", **FLAGS}, "42": {"content": "<x2>"}}}},
    "flags": {"tokenizer_config": {**CONFIG, "added_tokens_decoder": {"41": {"content": "<x1>", **FLAGS, "lstrip": True, "rstrip": True}}}},
    "named": {"tokenizer_config": {**CONFIG, "eos_token": "<x1>", "image_token": "<x2>", "add_bos_token": False}},
    "extra": {"tokenizer_config": {**CONFIG, "extra_special_tokens": ["<x2>", "<x1>"]}},
    "extra by name": {"tokenizer_config": {**CONFIG, "extra_special_tokens": {"audio_token": "<x2>"}}},
    "additional": {"tokenizer_config": {**CONFIG, "additional_special_tokens": ["<x1>"]}},
    "added_tokens": {"added_tokens": {"<x2>": 42, "<x1>": 41}},
    "special_tokens_map": {"special_tokens_map": {"pad_token": {"content": "<x1>", **FLAGS}, "additional_special_tokens": ["<x2>"]}},
    "both older ones": {"added_tokens": {"<x1>": 41}, "special_tokens_map": {"eos_token": "<x1>", "sep_token": "w2"}},
    "older ones beside a decoder": {
        "tokenizer_config": {**CONFIG, "added_tokens_decoder": {"41": {"content": "<x1>", **FLAGS}}}, "added_tokens": {"<x2>": 42},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    place = directory(tmp_path, **CASES[name])
    theirs, ours = AutoTokenizer.from_pretrained(place), TextTokenizer.load(place)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(ours.encode(text, add_special=False)) == ids, text
        assert ours.decode(ids, skip_special=True) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=True)
    # What an artifact stores of it is one file that says the same.
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "tokenizer.json").write_text(ours.library.to_str())
    again = TextTokenizer.load(tmp_path / "stored")
    assert again.added is False
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_file_that_all_agree_with_is_stored_as_it_is(tmp_path: Path) -> None:
    agreeing = {"tokenizer_config": {"bos_token": "<s>", "added_tokens_decoder": {"40": {"content": "<s>", **FLAGS}}}}
    assert TextTokenizer.load(directory(tmp_path, **agreeing)).added is False


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<x1>": 45}}, "the token '<x1>' is 45 where .*, and 41 behind the 42 tokens of the tokenizer"),
        ({"tokenizer_config": {"added_tokens_decoder": {"45": {"content": "<x1>"}}}}, "the token '<x1>' is 45"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x1>"}}}}, "'x' is no id of a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"41": 5}}}, "tokenizer_config.json: 5 is no token"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "holds a JSON list where an object of tokens is expected"),
        ({"added_tokens": [1]}, "added_tokens.json: holds a JSON list"),
    ],
)
def test_what_contradicts_is_refused_by_name(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TextTokenizer.load(directory(tmp_path, **files))
