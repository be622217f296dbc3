"""models/end_tokens.py: a response ends at every token that any file names, each known with the files that name it."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import ConfigError
from npucompile.models.end_tokens import end_tokens, token_ids


def chat(eos, added=(), vocab=None):
    """Files of a tokenizer whose configuration names an end of a turn."""
    tokens = [{"id": token, "content": content, "special": True} for content, token in added]
    return {"tokenizer_config": {"eos_token": eos}, "tokenizer": {"added_tokens": tokens, "model": {"vocab": vocab or {}}}}


@pytest.mark.parametrize(
    "files, eos",
    [
        ({"config": {}}, ()),
        ({"config": {"eos_token_id": None}}, ()),
        ({"config": {"eos_token_id": [3, 5]}}, (3, 5)),
        ({"config": {"model_type": "qwen3_5_moe", "text_config": {"eos_token_id": 9}}}, (9,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [5, 6]}}, (5, 6, 3)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"do_sample": False}}, (3,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": []}}, (3,)),
        ({"config": {"model_type": "qwen3_5", "eos_token_id": 4, "text_config": {"eos_token_id": [9, 4]}}}, (4, 9)),
        ({"config": {}, **chat("<|im_end|>", added=[("<|im_end|>", 8)])}, (8,)),
        ({"config": {"eos_token_id": 3}, **chat({"content": "<|im_end|>"}, added=[("<|im_end|>", 8)])}, (3, 8)),
        ({"config": {"eos_token_id": 3}, **chat("</s>", vocab={"</s>": 2})}, (3, 2)),
        ({"config": {"eos_token_id": 3}, **chat("</s>", vocab=[["<unk>", 0.0], ["</s>", -1.5]])}, (3, 1)),
        ({"config": {"eos_token_id": 3}, **chat("<|im_end|>", added=[("<|im_end|>", 3)])}, (3,)),
        ({"config": {"eos_token_id": 3}, **chat("<|elsewhere|>", added=[("<|im_end|>", 8)])}, (3,)),
        ({"config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "</s>"}}, (3,)),
        # Of files beside tokenizer.json: what older ones name, and ids of tokens that it lacks.
        ({"config": {}, **chat("</s>", vocab={"</s>": 2, "<e>": 4}), "special_tokens_map": {"eos_token": {"content": "<e>"}}}, (4,)),
        ({"config": {}, **chat("<x>", vocab={"</s>": 2}), "added_tokens": {"<x>": 7}}, (7,)),
        (
            {"config": {}, "tokenizer": {}, "tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {"7": {"content": "<x>"}}}},
            (7,),
        ),
        (
            {"config": {}, "tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {"7": {"content": "<x>"}}}, "tiktoken": {}},
            (7,),
        ),
    ],
)
def test_every_end_token_that_any_file_names_ends_a_response(tmp_path, files, eos):
    for name, values in files.items():
        (tmp_path / ("tiktoken.model" if name == "tiktoken" else f"{name}.json")).write_text(json.dumps(values))
    assert tuple(end_tokens(tmp_path, files["config"])) == eos


def test_each_is_known_with_the_files_that_name_it(tmp_path):
    for name, values in {"generation_config": {"eos_token_id": [5, 6]}, **chat("</s>", vocab={"</s>": 3})}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    files = end_tokens(tmp_path, {"eos_token_id": 3, "text_config": {"eos_token_id": [3, 5]}})
    assert files == {
        5: ("generation_config.json", "config.json"),
        6: ("generation_config.json",),
        3: ("config.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize("content", [{}, {"model": None, "added_tokens": 3}, {"model": {"vocab": 1}}, {"added_tokens": [1, {"id": "x"}]}])
def test_a_tokenizer_of_another_kind_has_no_ids(tmp_path, content):
    """What encodes text refuses it; an end of a turn is looked up in what is there."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert token_ids(tmp_path) == end_tokens(tmp_path, {}) == {}


def test_a_malformed_end_token_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": 3}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token is 3; expected a text"):
        end_tokens(tmp_path, {})
