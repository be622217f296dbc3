"""tools/prove/bringup/results.py: a rung adds up its cases, and a failure carries the heading of its assumption and the runtime's code."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.child_process import ChildError
from npucompile.tools.prove.bringup.results import RUNGS, BringupFailure, BringupFinding, RungResult, Timing, Wanted


def test_an_assumption_must_be_one_of_the_page():
    with pytest.raises(KeyError):
        BringupFailure("bad-luck", "", "").as_dict()


def test_the_code_of_a_failure_is_the_runtimes_before_that_of_the_process():
    assert BringupFailure.of("kernels", "MatMul", ChildError("ended with SIGABRT", "SIGABRT")).code == "SIGABRT"
    assert BringupFailure.of("kernels", "MatMul", ChildError("ended with SIGABRT: error code is 507015", "SIGABRT")).code == "507015"
    assert BringupFailure.of("kernels", "MatMul", ValueError("3"), "4x4: ") == BringupFailure("kernels", "MatMul", "4x4: 3")


def test_a_finding_survives_json_and_a_rung_is_finished_by_what_it_says_of_itself():
    first = BringupFinding(
        "buckets", "b1", 1.0, [BringupFailure("kernels", "b1", "no")], [Timing("b1", "", 0.5)], {"rows": 2, "why": "x"}, ["b3"]
    )
    assert BringupFinding.from_dict(json.loads(json.dumps(asdict(first)))) == first
    second = BringupFinding("buckets", "b2", 2.0, facts={"rows": 3})
    result = RungResult.of("buckets", [first, second])
    assert (result.seconds, result.facts, result.finished, result.passed) == (3.0, {"rows": 5, "why": "x"}, False, False)
    assert RungResult.of("buckets", [second, BringupFinding("buckets", "")]).passed


def test_a_rung_names_those_that_may_explain_it():
    failed = [RungResult(name, failures=[BringupFailure("kernels", "", "")]) for name in ("operators", "buckets", "serve")]
    assert [result.explained_by(failed) for result in failed] == [[], ["operators"], ["operators", "buckets"]]
    assert RungResult("layers").explained_by(failed) == []


def test_rungs_and_cases_can_be_chosen():
    wanted = Wanted.of(["operators:MatMul", "operators:Add", "serve"])
    taken = [(rung, case) for rung in RUNGS for case in ("b MatMul", "b Adds", "b Exp") if wanted.takes(rung, case)]
    assert taken == [("operators", "b MatMul"), ("operators", "b Adds"), ("serve", "b MatMul"), ("serve", "b Adds"), ("serve", "b Exp")]
    assert set(Wanted.of([]).cases) == set(RUNGS)
    with pytest.raises(SpecError, match="'operator' is no rung; legal are environment, operators"):
        Wanted.of(["operator:MatMul"])
