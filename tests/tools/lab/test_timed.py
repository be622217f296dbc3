"""tools/lab/timed.py: steps that NPUs timed are read, and move the fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.parameters import fitted, priors
from npucompile.tools.lab.accuracy import model_of
from npucompile.tools.lab.fit import fit
from npucompile.tools.lab.timed import read_bringup
from npucompile.tools.prove.bringup import archive

SECONDS = ((4, 0.050), (16, 0.070))


def report(path: Path, **changes) -> Path:
    timings = [{"what": f"decode-b{b}-q4", "seconds": s} for b, s in SECONDS]
    timings.append({"what": "prefill-b1-q128", "seconds": 0.1})
    data = {"device": "npu", "mesh": "dp=8,tp=2", "model": "qwen3.5-397b", "target": "ascend-a3", "quantization": "w4a8"}
    file = path / "bringup.json"
    file.write_text(json.dumps({**data, "rungs": [{"timings": timings}], **changes}))
    return file


def test_a_bring_up_is_read_and_moves_the_fit(tmp_path: Path) -> None:
    steps = read_bringup(report(tmp_path), 131)
    assert [(step.batch, step.seconds, step.system.candidates, str(step.system.layout)) for step in steps] == [
        (batch, seconds, 4, "dp=8,tp=2") for batch, seconds in SECONDS
    ]
    rows = {step.name: {"step_ms": 1e3 * step.seconds} for step in steps}
    found = fit(model_of({}, steps), rows, priors(), fitted(), iterations=6)
    for step in steps:
        before, after = (abs(step.predicted_ms(p) / 1e3 / step.seconds - 1) for p in (priors(), found.parameters))
        assert after < before
        assert after < 0.1


def test_the_archive_that_was_sent_back_is_read_too(tmp_path: Path) -> None:
    sent = archive.write(tmp_path, [report(tmp_path)], {}, "ascend910_93", 0.0)
    assert [step.seconds for step in read_bringup(sent, 131)] == [seconds for _, seconds in SECONDS]
    with pytest.raises(SpecError, match=r"is no report of a bring-up; legal is its bringup\.json or bringup\.tar\.xz"):
        read_bringup(archive.write(tmp_path, [], {}, "ascend910_93", 0.0), 131)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "emulated"}, "was measured on emulated"),
        ({"rungs": [{"timings": []}]}, "no timed decode bucket"),
        ({"mesh": 3}, "is no report of a bring-up"),
    ],
)
def test_other_reports_are_refused(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_bringup(report(tmp_path, **changes), 131)
