"""tools/commands/models.py: every preset with its size."""

from __future__ import annotations

from support import tiny

from npucompile.models import registry


def test_every_preset_is_listed_with_its_size(tmp_path):
    lines = tiny.cli(tmp_path, "models").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.presets())
    by_name = {line.split()[0]: line for line in lines}
    # Active and idle parameters of the published model, MTP head included.
    assert 390 < float(by_name["qwen3.5-397b"].split()[1]) < 410
    assert 26 < float(by_name["qwen3.5-27b"].split()[1]) < 29
    assert "sizes only" in by_name["qwen3.5-27b"]
    assert "bundled" in by_name["qwen3.5-tiny"]
    assert 0.003 < float(by_name["qwen3.5-tiny"].split()[1]) < 0.006
