"""tools/bench/serve/workload.py: prompts of the lengths asked for, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.texts import byte_tokenizer, trained_tokenizer

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.tools.bench.serve.workload import Vocabulary, drawn, read

BYTES = Vocabulary(byte_tokenizer())


def test_special_tokens_are_never_drawn() -> None:
    vocabulary = Vocabulary(trained_tokenizer())
    assert 0 not in vocabulary.ids  # <|end|>
    assert len(vocabulary.ids) == trained_tokenizer().get_vocab_size() - 1
    prompts = drawn(vocabulary, 20, 50, 4, 0.0, 1)
    assert set().union(*(prompt.token_ids for prompt in prompts)) <= set(vocabulary.ids)


def test_random_lengths_are_exact_or_within_the_ratio() -> None:
    prompts = drawn(BYTES, 5, 30, 7, 0.0, 1)
    assert [(len(prompt.token_ids), prompt.output_tokens) for prompt in prompts] == [(30, 7)] * 5
    assert prompts == drawn(BYTES, 5, 30, 7, 0.0, 1) != drawn(BYTES, 5, 30, 7, 0.0, 2)
    varied = drawn(BYTES, 400, 30, 10, 0.5, 1)
    assert {len(prompt.token_ids) for prompt in varied} == set(range(15, 46))
    assert {prompt.output_tokens for prompt in varied} == set(range(5, 16))
    with pytest.raises(SpecError, match="is 1; legal is from 0"):
        drawn(BYTES, 5, 30, 7, 1, 1)


def test_a_file_of_prompts_is_repeated_to_the_number_wanted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert [prompt.text for prompt in read(BYTES, file, None, 4)] == ["one", "two"]
    three = read(BYTES, file, 3, 4)
    assert [prompt.text for prompt in three] == ["one", "two", "one"]
    assert (three[0].token_ids, three[0].output_tokens) == (BYTES.encode("one"), 4)


def test_empty_files_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_text("\n")
    with pytest.raises(SpecError, match="has no prompt"):
        read(BYTES, file, None, 4)
    with pytest.raises(ModelError, match=r"is not a tokenizer\.json"):
        Vocabulary.load(file)
