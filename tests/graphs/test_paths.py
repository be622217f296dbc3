"""graphs/paths.py: any text can be asked whether it is a path, wherever a user's text is."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import ArtifactMissing, NpucompileError, SpecError, UnknownModel
from npucompile.graphs.paths import directory_named, file_named
from npucompile.models import draft_source, registry
from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.plan.views import _read
from npucompile.tools.commands import import_line
from npucompile.tools.locate import artifact_path

NO_PATHS = ["x" * 580, f"{'y/' * 4000}z", "a\0b", "~nobody-of-that-name/x", "", "vllm serve " + "--flag value " * 50]
"""Texts that pathlib raises on, each for another reason, and others that name nothing."""


@pytest.mark.parametrize("text", NO_PATHS, ids=["long name", "long path", "zero byte", "nobody's home", "empty", "line"])
def test_a_text_that_is_no_path_names_nothing(text, tmp_path):
    assert file_named(text) is None
    assert directory_named(text) is None or text == ""
    for ask, error in [
        (registry.find, UnknownModel),
        (lambda name: draft_source.with_draft_model(registry.find("qwen3-8b"), name), UnknownModel),
        (lambda name: artifact_path(tmp_path, name), ArtifactMissing),
        (_read, SpecError),
    ]:
        if text:
            with pytest.raises(error) as raised:
                ask(text)
            assert isinstance(raised.value, NpucompileError)


def test_files_and_directories_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert file_named("~/file") == file_named(tmp_path / "file") == tmp_path / "file"
    assert (directory_named("~/file"), file_named("~")) == (None, None)
    assert directory_named("~") == tmp_path


@pytest.mark.parametrize("model", ["acme/" + "m" * 600, "~nobody-of-that-name/m"])
def test_a_launch_line_of_any_length_is_a_line(model):
    line = f'vllm serve {model} --tensor-parallel-size 2 --speculative-config \'{{"method": "eagle3", "model": "{model}-head"}}\''
    result = CliRunner().invoke(import_line.command, [line], catch_exceptions=False)
    assert (result.exit_code, "--mesh dp=1,tp=2" in result.output) == (0, True)
    assert not import_text(line.replace(model, f"{model}\0")).roles[0].proposal.known
