"""tools/prove/bringup/findings.py: what passed is taken over where it is of the same, and a line that was cut off counts as absent."""

from __future__ import annotations

from npucompile.tools.prove.bringup.findings import NAME, Findings
from npucompile.tools.prove.bringup.results import BringupFailure, BringupFinding

SAME = {"artifact": "a", "version": "cann-8.5"}
BAD = [BringupFailure("kernels", "", "")]


def begun(path, identity=SAME, resume=True):
    findings = Findings(path)
    return findings, findings.begin(identity, resume=resume)


def test_what_passed_is_kept_and_what_failed_or_was_cut_off_is_not(tmp_path):
    path = tmp_path / "new" / NAME
    findings, kept = begun(path)
    assert kept == 0
    for finding in (
        *(BringupFinding("operators", "good", 1.5), BringupFinding("operators", "bad", failures=BAD), BringupFinding("operators", "")),
        *(BringupFinding("layers", "one"), BringupFinding("layers", "", facts={"steps": 3})),
    ):
        findings.add(finding)
    with path.open("a") as file:
        file.write('{"rung": "buckets", "case": "b')
    again, kept = begun(path)
    assert kept == 2
    # The rung of operators has a case to judge again, so that it has not ended.
    assert [(result.name, result.finished, result.seconds) for result in again.results()] == [
        ("operators", False, 1.5),
        ("layers", True, 0.0),
    ]
    assert (again.judged("operators"), again.judged("buckets")) == ({"good"}, frozenset())
    again.add(BringupFinding("operators", "bad"))
    assert begun(path)[1] == 3


def test_findings_of_something_else_are_not_taken_over(tmp_path):
    findings, _ = begun(tmp_path / NAME)
    findings.add(BringupFinding("operators", "good"))
    assert begun(tmp_path / NAME, resume=False)[1] == 0
    findings, _ = begun(tmp_path / NAME)
    findings.add(BringupFinding("operators", "good"))
    assert begun(tmp_path / NAME, {**SAME, "version": "cann-9.0"})[1] == 0
