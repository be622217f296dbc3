"""tools/prove/bringup/bisect.py: a fault that goes away with one switch is laid to it, and to none where none helps."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import bringups, faulty
from support.faulty import Opens

from npucompile.graphs.errors import SpecError
from npucompile.lowering.switches import AIV, BUCKETS, CAPTURE, KERNELS, NZ, OVERLAP, RUN_AHEAD, SWITCHES
from npucompile.tools.prove.bringup.bisect import FAILS, PASSES, BisectTrial, advice, bisect
from npucompile.tools.ranks.environment import EXPANSION_MODE


def tried(artifact, condition, bucket, off=(), **environment):
    opens = Opens(functools.partial(faulty.wrong_where, condition))
    bringup = bringups.ladder(artifact, opens)
    bringup.settings = replace(bringup.settings, off=frozenset(off))
    bringup.environment = {**bringup.environment, **environment}
    return list(bisect(bringup, bucket))


def outcomes(trials):
    return {trial.off: trial.outcome for trial in trials}


@pytest.mark.parametrize("off", [(RUN_AHEAD, KERNELS), ()], ids=["others are off", "none is off"])
@pytest.mark.short_cases("others are off")
def test_weights_that_are_wrong_in_nz_alone(small_artifact, off):
    """Each switch that may help costs the start of two processes."""
    trials = tried(small_artifact, faulty.in_nz, "decode-b1-q2", off)
    assert outcomes(trials) == {
        "": FAILS,
        NZ: PASSES,
        AIV: f"{EXPANSION_MODE} is not set",
        RUN_AHEAD: "off already" if off else FAILS,
        BUCKETS: "there are no others",
        OVERLAP: "its operators run one after the other",
        CAPTURE: "GE captures nothing",
        KERNELS: "off already" if off else FAILS,
    }
    assert {trial.rung for trial in trials} == {"buckets"}
    assert [trial.off for trial in trials if trial.seconds] == ["", NZ, *([] if off else (RUN_AHEAD, KERNELS))]
    assert "decode-b1-q2: row 0 of group 0 has tokens" in trials[0].line
    (said,) = advice(small_artifact, "decode-b1-q2", trials)
    assert said.startswith(f"without nz nothing fails: {SWITCHES[NZ]}. npucompile serve {small_artifact.path} --off nz")


def test_where_none_helps_it_says_what_to_look_at_next(small_artifact):
    trials = [BisectTrial("", "buckets", FAILS), BisectTrial(NZ, "buckets", FAILS), BisectTrial(AIV, "buckets", "no part")]
    nothing, other = advice(small_artifact, "decode-b1-q2", trials)
    assert f"bringup {small_artifact.path} --only operators:decode-b1-q2 --only layers:decode-b1-q2" in nothing
    assert other.endswith("--backend aclgraph")
    assert "--mesh" not in other
    assert other.count("--target ascend-a3") == 1


@pytest.mark.long
def test_a_bucket_without_a_fault_is_tried_once_in_each_way(small_artifact):
    trials = list(bisect(bringups.ladder(small_artifact), "decode-b1-q2"))
    assert [(trial.rung, trial.outcome) for trial in trials] == [("buckets", PASSES), ("alternation", PASSES)]
    assert advice(small_artifact, "decode-b1-q2", trials)[0].startswith("nothing is wrong with decode-b1-q2")


@pytest.mark.parametrize(
    ("condition", "switch", "rung"),
    [
        (faulty.in_aiv, AIV, "buckets"),
        (faulty.ahead, RUN_AHEAD, "alternation"),
        (faulty.beside_others, BUCKETS, "buckets"),
        (faulty.compiled_online, KERNELS, "buckets"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.long
def test_each_switch_is_found_alone(npu_artifact, condition, switch, rung):
    trials = tried(npu_artifact, condition, "decode-b4-q2", **{EXPANSION_MODE: "AIV"})
    assert [trial.off for trial in trials if trial.outcome == PASSES and trial.off] == [switch]
    assert [trial.off for trial in trials if trial.outcome == FAILS] == ["", *(s for s in SWITCHES if s not in (switch, CAPTURE, OVERLAP))]
    assert trials[-1].rung == rung
    (said,) = advice(npu_artifact, "decode-b4-q2", trials)
    assert f"--off {switch}" in said
    assert ("--ge-kernels prebuilt" in said) == (switch == KERNELS)


@pytest.mark.long
def test_a_capture_is_found(tmp_path, monkeypatch):
    artifact = bringups.npu_artifact(tmp_path, monkeypatch, "1", {**bringups.ONE_BUCKET, "backend": "aclgraph"}, **bringups.TWO_LAYERS)
    trials = tried(artifact, faulty.is_captured, "decode-b1-q2")
    assert {switch for switch, outcome in outcomes(trials).items() if outcome == PASSES} == {CAPTURE}
    assert outcomes(trials)[KERNELS] == "GE has no part in captured graphs"


def test_what_cannot_be_bisected_is_refused(small_artifact):
    bringup = bringups.ladder(small_artifact)
    with pytest.raises(SpecError, match="--bisect b1: there is no such bucket; legal are prefill-b1-q4, decode-b1-q2"):
        next(bisect(bringup, "b1"))
    with pytest.raises(SpecError, match="--only buckets with --off SWITCH"):
        next(bisect(replace(bringup, config=object()), "decode-b1-q2"))


def test_the_page_of_the_day_on_hardware_has_every_switch():
    table = (Path(__file__).parents[4] / "docs" / "on-hardware.md").read_text().split("| `--off` | then |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE) == list(SWITCHES)
