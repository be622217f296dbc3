"""tools/prove/bringup/child.py: a process with a device says when a case begins and what it came to, and ends when the device is spent."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import pytest

from npucompile.lowering.ascend.emulator.device import VERSION
from npucompile.tools.prove.bringup.child import Cases, Child, Spent
from npucompile.tools.prove.bringup.results import BringupFailure, BringupFinding, Judgement
from npucompile.tools.ranks.rank_settings import RankSettings


@dataclass(frozen=True)
class Case:
    name: str
    judgement: object = Judgement()
    assumption = "kernels"

    def judge(self, host):
        assert host.device.kind == "emulated"
        if isinstance(self.judgement, BaseException):
            raise self.judgement
        return self.judgement


@pytest.fixture
def child(small_artifact):
    made = Child(small_artifact, RankSettings(device="emulated"), 0, io.StringIO())
    yield made
    made.close()


def lines(child):
    return [json.loads(line) for line in child._out.getvalue().splitlines()]


def test_each_case_begins_and_is_judged(child):
    bad = Judgement([BringupFailure("lengths", "b", "1 < 2")])
    child.do(Cases("operators", (Case("a"), Case("b", bad))))
    version, *said = lines(child)
    assert version == {"version": VERSION}
    assert [line.get("begins") or line["judged"]["case"] for line in said] == ["a", "a", "b", "b"]
    assert (said[0]["rung"], said[0]["assumption"], said[1]["spent"]) == ("operators", "kernels", False)
    assert BringupFinding.from_dict(said[3]["judged"]).failures == bad.failures
    assert child.failed


@pytest.mark.parametrize(
    ("judgement", "code"),
    [
        (RuntimeError("error code is 507015"), "507015"),
        (MemoryError(), ""),
        (Judgement([BringupFailure("kernels", "b", "x", "silent")], spent=True), "silent"),
    ],
)
def test_nothing_runs_behind_a_case_that_leaves_the_device_spent(child, judgement, code):
    with pytest.raises(Spent):
        child.do(Cases("operators", (Case("a"), Case("b", judgement), Case("c"))))
    *_, last = lines(child)
    assert (last["judged"]["case"], last["spent"], last["judged"]["failures"][0]["code"]) == ("b", True, code)


def test_what_happens_between_begin_and_end_is_about_the_case(child):
    class Interrupted:
        def run(self, child):
            child.begin("buckets", "b1", "one-session")
            raise KeyboardInterrupt("a rank is lost")

    with pytest.raises(Spent):
        child.do(Interrupted())
    failure = lines(child)[-1]["judged"]["failures"][0]
    assert (failure["what"], failure["assumption"], failure["message"]) == ("b1", "one-session", "a rank is lost")


def test_steps_of_a_bar_are_signs_of_life(child):
    with child.progress.bar("compile", 2) as bar:
        bar.step("decode")
    assert lines(child) == [{"moves": "compile 1/2 decode"}]
