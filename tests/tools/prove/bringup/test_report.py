"""tools/prove/bringup/report.py: both files say what failed, which assumption that refutes, and what did not run."""

from __future__ import annotations

import json

from npucompile.tools.prove.bringup.report import as_dict, write
from npucompile.tools.prove.bringup.results import BringupFailure, RungResult, Timing


def test_a_report_is_two_files_that_need_nothing_else(npu_artifact, tmp_path):
    timing = Timing("layer <0>", "4x4", 2e-3, 100, 1e-3)
    results = [
        RungResult("environment", 0.5, facts={"device": "npu:0"}),
        RungResult("operators", 2.0, [BringupFailure("lengths", "attention", "1 < 2", "507015")], [timing], left_out=["a MatMul"]),
        RungResult("layers", 1.0, [BringupFailure("one-session", "layer00", "3 < 4")], finished=False),
    ]
    findings = as_dict(npu_artifact, "npu", results)
    page, data = write(tmp_path / "report", findings)
    assert json.loads(data.read_text()) == json.loads(json.dumps(findings))
    assert findings["passed"] is False
    assert [(rung["name"], rung["passed"], rung["seconds"]) for rung in findings["rungs"]] == [
        ("environment", True, 0.5),
        ("operators", False, 2.0),
        ("layers", False, 1.0),
    ]
    assert [rung["explained_by"] for rung in findings["rungs"]] == [[], [], ["operators"]]
    assert findings["not_run"] == ["collectives", "buckets", "alternation", "serve", "handovers"]
    assert findings["rungs"][1]["failures"][0]["heading"] == "Length conventions."
    text = page.read_text()
    for part in (
        "layer &lt;0&gt;",
        "2,000.0",
        "1,000.0",
        "2.0",
        "Length conventions. (lengths in docs/on-hardware.md)",
        "1 &lt; 2",
        "not run",
        "a MatMul",
        "attention (507015)",
        "May follow from what failed in: operators",
        "Not all of it was run",
    ):
        assert part in text
    assert "http" not in text
    assert "src=" not in text
