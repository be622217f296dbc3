"""tools/commands/quantize.py: what is printed, drawn and refused."""

from __future__ import annotations

import json

import pytest
from support import quantised, tiny


def test_errors_are_printed_and_drawn(tmp_path):
    quantised.write(tmp_path / "float", "moe")
    arguments = ("quantize", tmp_path / "float", "--scheme", "w4a8", "--keep", "*.shared_expert.*")
    result = tiny.cli(tmp_path, *arguments, "--out", tmp_path / "a", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["matrix", "format", "error"]
    assert "mlp.experts" in lines[1]
    assert lines[-1] == str(tmp_path / "a")
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["w4a8_dynamic", "w8a8_dynamic"]
    assert (tmp_path / "a.svg").stat().st_size > 1000
    result = tiny.cli(tmp_path, *arguments, "--out", tmp_path / "b", "--json")
    values = json.loads(result.stdout)
    assert (values["scheme"], values["out"]) == ("w4a8", str(tmp_path / "b"))
    errors = [matrix["relative_rms"] for matrix in values["matrices"]]
    assert errors == sorted(errors, reverse=True)
    assert 0.003 < errors[-1] < 0.01 < 0.05 < errors[0] < 0.2, "int8 and int4 of random numbers"
    assert not any("shared_expert" in matrix["name"] for matrix in values["matrices"])
    assert tiny.contents(tmp_path / "a") == tiny.contents(tmp_path / "b")


def test_what_a_recipe_leaves_out_is_said(tmp_path):
    quantised.write(tmp_path / "float", "dense")
    (tmp_path / "text").write_text("some text")
    arguments = ("quantize", tmp_path / "float", "--scheme", "w4a8", "--out", tmp_path / "out", "--calibrate", tmp_path / "text")
    result = tiny.cli(tmp_path, *arguments)
    assert "text is not read: no matrix of float has one scale of activations for all tokens in w4a8; --static PATTERN" in result.stderr
    assert result.exit_code == 0, result.output
    assert "no matrix of float becomes int4: recipes give int4 to experts only" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "errors.txt"], "legal are .svg, .png, .pdf"),
        (["--keep", "*.none"], "no matrix is named '*.none'"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, arguments, message):
    quantised.write(tmp_path / "float", "dense")
    arguments = ("quantize", tmp_path / "float", "--scheme", "w8a8", "--out", tmp_path / "out", *arguments)
    assert message in tiny.refused(tmp_path, *arguments)
    assert not (tmp_path / "out").exists()
