"""tools/lab/calibration.py: parameters that are written are those that `plan` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from npucompile.tools.advisor.plan.parameters import fitted, priors
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.cli import main
from npucompile.tools.lab import calibration
from npucompile.tools.lab.accuracy import model_of, rows_of
from npucompile.tools.lab.fit import fit

NAMES = ("qwen3-32b-a3x4-mix-4k-1.5k-11ms", "qwen3-32b-a3x8-mix-18k-4k-12ms")


def test_a_file_is_written_that_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fit of two rows, which takes no minute."""
    rows = {name: rows_of()[name] for name in NAMES}
    model = model_of({name: case_of(name) for name in rows})
    monkeypatch.setattr(calibration, "refit", lambda timed: fit(model, rows, priors(), priors(), iterations=3))
    file = tmp_path / "parameters.json"
    result = CliRunner().invoke(main, ["calibrate", "--out", str(file), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["parameters"]
    assert shown["memory"]["value"] == pytest.approx(fitted(file).memory, rel=1e-3)
    assert "fit to 2 rows and steps" in json.loads(file.read_text())["memory"]["evidence"]
    words = ["plan", "--deployment", NAMES[0], "--json"]
    own, other = (json.loads(CliRunner().invoke(main, [*words, *more]).stdout) for more in ([], ["--parameters", str(file)]))
    assert own["predicted"]["tpot_ms"] != other["predicted"]["tpot_ms"]
    assert "prefill_layer_ms" in CliRunner().invoke(main, ["calibrate"]).output
