"""tools/commands/models.py: every preset with its size, and a small model with the layers of one."""

from __future__ import annotations

import json

import pytest
from support import tiny

from npucompile.models import registry
from npucompile.models.presets import DRAFT_PRESETS
from npucompile.tools.builder import plan as planning
from npucompile.tools.notation import PrefillSize


def test_every_preset_is_listed_with_its_size(tmp_path):
    lines = tiny.cli(tmp_path, "models").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*registry.presets(), *DRAFT_PRESETS]
    by_name = {line.split()[0]: line for line in lines}
    # Active and idle parameters of the published model, MTP head included.
    assert 390 < float(by_name["qwen3.5-397b"].split()[1]) < 410
    assert 26 < float(by_name["qwen3.5-27b"].split()[1]) < 29
    assert "sizes only" in by_name["qwen3.5-27b"]
    assert "bundled" in by_name["qwen3.5-tiny"]
    assert 0.003 < float(by_name["qwen3.5-tiny"].split()[1]) < 0.006


def test_a_small_model_with_the_layers_of_a_large_one_is_written(tmp_path, tiny_checkpoint):
    small, again, other = tmp_path / "small", tmp_path / "again", tmp_path / "other"
    result = tiny.cli(tmp_path, "models", tiny_checkpoint, "--reduce", small)
    assert (result.exit_code, result.stdout) == (0, f"{small}\n")
    tiny.cli(tmp_path, "models", tiny_checkpoint, "--reduce", again)
    tiny.cli(tmp_path, "models", tiny_checkpoint, "--reduce", other, "--seed", 1)
    assert tiny.contents(small) == tiny.contents(again)
    assert {name for name, data in tiny.contents(other).items() if data != tiny.contents(small)[name]} == {"model.safetensors"}
    assert json.loads((small / "config.json").read_text())["layer_types"] == tiny.CONFIG["layer_types"]
    plan = planning.plan(planning.Options(str(small), buckets=(1,), prefill=(PrefillSize(4),)))
    assert (plan.weights, plan.source.tokenizer is not None) == ("stored", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3.5-27b"], "MODEL and --reduce DIRECTORY belong together"),
        (["--reduce", "there"], "MODEL and --reduce DIRECTORY belong together"),
        (["qwen3.5-27b", "--reduce", "full"], "full exists; legal is a new or empty directory"),
    ],
)
def test_a_small_model_of_nothing_or_nowhere_is_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert message in tiny.refused(tmp_path, "models", *arguments)
    assert not (tmp_path / "there").exists()
