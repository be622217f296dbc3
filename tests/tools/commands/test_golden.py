"""tools/commands/golden.py: prompts of a checkpoint with a tokenizer and without, and what is refused."""

from __future__ import annotations

import pytest
from support import tiny
from support.texts import byte_tokenizer

from npucompile.tools.commands import golden as command
from npucompile.tools.prove.golden import LENGTHS, TEXTS, read


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    return [tiny.write_checkpoint(root / str(with_text), tokenizer=with_text) for with_text in (True, False)]


def test_texts_of_a_checkpoint_with_a_tokenizer_and_random_ids_of_one_without(tmp_path, checkpoints):
    for checkpoint in checkpoints:
        result = tiny.cli(tmp_path, "golden", checkpoint, "--out", tmp_path / "file", "--tokens", 2, "--top", 3)
        assert result.exit_code == 0, result.output
        assert f"{tmp_path / 'file'}: 8 prompts of 2 tokens; next: npucompile bringup ARTIFACT --golden" in result.output
        found = read(tmp_path / "file")
        lengths = [len(text.encode()) for text in TEXTS] if checkpoint == checkpoints[0] else list(LENGTHS)
        assert [len(prompt.prompt) for prompt in found.prompts] == lengths
        assert {len(top) for prompt in found.prompts for top in prompt.top} == {3}
        assert found.made_by["dtype"] == "float32"


def test_own_prompts_take_a_tokenizer(tmp_path, checkpoints):
    options = ("--out", tmp_path / "file", "--tokens", 1, "--prompt", "ab")
    assert tiny.cli(tmp_path, "golden", checkpoints[0], *options).exit_code == 0
    assert [prompt.prompt for prompt in read(tmp_path / "file").prompts] == [tuple(byte_tokenizer().encode("ab").ids)]
    assert "has no tokenizer; legal is none" in tiny.refused(tmp_path, "golden", checkpoints[1], *options)


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "pip install transformers" in tiny.refused(tmp_path, "golden", tmp_path, "--out", tmp_path / "file")
