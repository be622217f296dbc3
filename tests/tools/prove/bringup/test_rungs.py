"""tools/prove/bringup/rungs.py: a fault is found by the rung that is about it, and whatever a device does ends none but its case."""

from __future__ import annotations

import pytest
from support import bringups, faulty, optional
from support.faulty import Opens, OpensOnce, is_alone, is_layer, is_whole, lost_writes, wrong_results

from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.emulator.fault import ABORTS, HANGS, KINDS, MEMORY, RAISES, Fault
from npucompile.tools.inspection.cost import step_cost
from npucompile.tools.prove.bringup import layers, rungs
from npucompile.tools.prove.bringup.buckets import one_after_another
from npucompile.tools.prove.bringup.on_all_ranks import READY
from npucompile.tools.prove.bringup.results import HANDOVERS, RUNGS
from npucompile.tools.prove.bringup.steps import StepPlanner

HANG_S = 60.0
CODES = {RAISES: "507015", ABORTS: "SIGABRT", HANGS: "silent", MEMORY: "out of memory"}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(layers, "STEPS", 2)


@pytest.fixture
def runnable():
    """The rungs that this machine can pass: all, but for handovers where it lacks the libraries of the transfer engine."""
    return [rung for rung in RUNGS if rung != HANDOVERS or optional.has_transfer_engine()]


def test_a_device_without_a_fault_passes_every_rung_with_times_beside_estimates(npu_artifact, runnable):
    results = bringups.ladder(npu_artifact, wanted=runnable).run()
    assert [(result.name, result.failures, result.passed) for result in results] == [(name, [], True) for name in runnable]
    by_name = {result.name: result for result in results}
    assert by_name["operators"].facts["run"] == len(by_name["operators"].timings) > 100
    assert by_name["operators"].facts["run"] + len(by_name["operators"].left_out) == by_name["operators"].facts["distinct"]
    assert all(timing.estimate_s and timing.seconds > 0 for name in ("operators", "layers", "buckets") for timing in by_name[name].timings)
    # As inspect --cost prices them: no kernel takes less than its launch.
    kernels = [timing for timing in by_name["operators"].timings if "MatMul" in timing.what or "Norm" in timing.what]
    assert kernels
    assert all(timing.estimate_s > parameters("ascend910_93").launch_gap_s for timing in kernels)
    priced = {entry.bucket.name: step_cost(npu_artifact, entry).step_ms / 1e3 for entry in npu_artifact.manifest.graphs}
    assert {timing.what: timing.estimate_s for timing in by_name["buckets"].timings} == pytest.approx(priced)
    assert {timing.what for timing in by_name["buckets"].timings} == {"prefill-b1-q4", "decode-b2-q2", "decode-b4-q2"}
    assert by_name["buckets"].facts["rows"] > 10
    assert by_name["alternation"].facts["rows"] > 10
    assert (
        by_name["buckets"].facts["other_tokens"] == by_name["alternation"].facts["other_tokens"] == by_name["serve"].facts["compiles"] == 0
    )


@pytest.mark.parametrize(
    ("on_run", "wanted", "assumptions", "what"),
    [
        (wrong_results(is_alone("FusedInferAttentionScore")), ("operators:FusedInfer", "layers"), {"lengths"}, "FusedInferAttentionScore"),
        (wrong_results(is_layer), ("layers", "serve"), {"write-after-read"}, "layer00_prologue"),
        (wrong_results(is_whole), ("buckets",), {"one-session"}, "prefill-b1-q4"),
        (lost_writes(is_whole), ("buckets",), {"one-session", "write-after-read"}, "b"),
        (faulty.loses_a_pool_between_decode_buckets, ("alternation", "handovers"), {"alternation"}, "all buckets in turns"),
    ],
    ids=["operator", "layer", "bucket", "bucket's state", "alternation"],
)
@pytest.mark.short_cases("layer")
def test_a_fault_is_found_by_its_rung_and_the_next_one_runs(npu_artifact, runnable, on_run, wanted, assumptions, what):
    results = bringups.ladder(npu_artifact, Opens(on_run), wanted).run()
    assert [(result.name, result.finished, result.passed) for result in results] == [
        (text.partition(":")[0], True, number > 0 and text in runnable) for number, text in enumerate(wanted)
    ]
    failure = results[0].failures[0]
    assert failure.assumption in assumptions
    assert what in failure.what


def test_with_stop_nothing_runs_behind_a_rung_that_fails(small_artifact):
    wrong = Opens(wrong_results(is_alone("FusedInferAttentionScore")))
    bringup = bringups.ladder(small_artifact, wrong, ("operators:FusedInfer", "layers", "serve"), stop=True)
    assert [result.name for result in bringup.run()] == ["operators"]
    assert not bringup.passed


def test_a_device_that_cannot_be_opened_is_said_once(small_artifact):
    bringup = bringups.ladder(small_artifact, faulty.refuses_to_open)
    (result,) = bringup.run()
    (failure,) = result.failures
    assert (result.name, bringup.passed, failure.assumption) == ("environment", False, "device")
    assert "the device is not there" in failure.message


# --- what ends a process with a device ---


@pytest.mark.short_cases("aborts")
@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_that_ends_its_process_is_named_and_all_others_are_judged(small_artifact, tmp_path, kind):
    opens = OpensOnce(tmp_path, {0: Fault(9, kind)})
    bringup = bringups.ladder(small_artifact, opens, ["operators:Mul"], limit_s=HANG_S if kind == HANGS else None)
    (result,) = bringup.run()
    struck = [step for step in opens.steps() if step["device"] == 0][-1]
    (failure,) = result.failures
    assert struck["names"][-1] in failure.what.split()
    assert failure.code == CODES[kind]
    assert result.finished
    assert bringup.findings.judged("operators") == {timing.what for timing in result.timings} | {failure.what}
    assert len(result.timings) > 5


@pytest.fixture(scope="module")
def clean(small_artifact, tmp_path_factory):
    """A bring-up without a fault, and the names of the operators of each step of its devices behind the one whose rates are measured.

    Handovers are among its rungs, which takes the transfer engine.
    """
    optional.transfer_engine()
    directory = tmp_path_factory.mktemp("clean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "STEPS", 2)
        bringup = bringups.ladder(small_artifact, OpensOnce(directory))
        assert all(result.passed for result in bringup.run())
    steps = OpensOnce(directory).steps()
    return bringup, [[step for step in steps if step["device"] == device] for device in (1, 2)]


def files_of(artifact):
    """The file of each bucket."""
    return {entry.bucket.name: entry.compiled.file.split("/")[-1] for entry in artifact.manifest.graphs}


def places(clean, rung):
    """The device that runs a rung, and its first and last steps there."""
    bringup, (alone, whole) = clean
    operators = len(alone) - layers.STEPS * len(bringup.findings.judged("layers"))
    planner, buckets = StepPlanner.of(bringup.artifact), [entry.bucket for entry in bringup.artifact.manifest.graphs]
    # Each bucket runs a step when it starts.
    first = len(buckets) + 1
    in_buckets = len(buckets) + sum(len(steps) for _, steps, _ in one_after_another(planner, buckets))
    in_turns = in_buckets + next(result for result in bringup.results if result.name == "alternation").facts["steps"]
    return {
        "operators": (1, (1, operators)),
        "layers": (1, (operators + 1, len(alone))),
        "buckets": (2, (first, in_buckets)),
        "alternation": (2, (in_buckets + 1, in_turns)),
        "serve": (2, (in_turns + 1,)),
        "handovers": (2, (len(whole),)),
    }[rung]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung not in ("environment", "collectives")])
@pytest.mark.long
def test_whatever_ends_a_process_is_the_finding_of_its_case_and_all_else_is_judged(small_artifact, clean, tmp_path, rung, kind):
    device, numbers = places(clean, rung)
    for number in numbers:
        directory = tmp_path / str(number)
        directory.mkdir()
        opens = OpensOnce(directory, {device: Fault(number, kind)})
        bringup = bringups.ladder(small_artifact, opens, limit_s=HANG_S if kind == HANGS else None)
        results = bringup.run()
        assert [(result.name, bool(result.failures)) for result in results] == [(name, name == rung) for name in RUNGS]
        assert all(result.finished for result in results)
        (failure,) = next(result.failures for result in results if result.name == rung)
        assert failure.code == CODES[kind]
        struck = [step for step in opens.steps() if step["device"] == device][-1]
        buckets = {file: name for name, file in files_of(small_artifact).items()}
        where = {
            "operators": struck["names"][-1],
            "layers": struck["names"][0].split("/")[0],
            "buckets": buckets.get(struck["file"], ""),
        }
        assert where.get(rung, "") in failure.what
        for name in RUNGS:
            assert bringup.findings.judged(name) == clean[0].findings.judged(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short_cases("aborts")
def test_a_bucket_that_does_not_start_is_tried_again_where_its_kind_has_no_other(small_artifact, tmp_path, kind):
    opens = OpensOnce(tmp_path, {1: Fault(2, kind)})
    results = bringups.ladder(small_artifact, opens, ["buckets", "serve"], limit_s=HANG_S if kind == HANGS else None).run()
    assert [(result.name, bool(result.failures), result.finished) for result in results] == [
        ("buckets", True, True),
        ("serve", False, True),
    ]
    struck = [step for step in opens.steps() if step["device"] == 1][-1]
    files = files_of(small_artifact)
    (failure,) = results[0].failures
    assert failure.code == CODES[kind]
    assert files[failure.what.removeprefix("starting ")] == struck["file"]
    assert {timing.what for timing in results[0].timings} == set(files)


@pytest.mark.long
def test_one_that_never_starts_is_named_and_left_out(npu_artifact):
    files = files_of(npu_artifact)
    results = bringups.ladder(npu_artifact, Opens(faulty.ends_in(files["decode-b2-q2"])), ["buckets", "serve"]).run()
    assert [(result.name, [failure.what for failure in result.failures], result.finished) for result in results] == [
        ("buckets", ["starting decode-b2-q2"], True),
        ("serve", [], True),
    ]
    assert {timing.what for timing in results[0].timings} == {"prefill-b1-q4", "decode-b4-q2"}


@pytest.mark.long
def test_one_that_never_starts_and_cannot_be_left_out_ends_all(small_artifact):
    bringup = bringups.ladder(small_artifact, Opens(faulty.ends_in(files_of(small_artifact)["decode-b1-q2"])), ["buckets", "serve"])
    (result,) = bringup.run()
    assert [failure.what for failure in result.failures] == ["starting decode-b1-q2", READY]
    assert not bringup.passed


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.long
def test_every_mesh_climbs_the_ladder_to_its_end(mesh, tmp_path, monkeypatch, runnable):
    monkeypatch.setattr(layers, "STEPS", 1)
    monkeypatch.setattr(rungs, "RECORDED_STEPS", 1)
    artifact = bringups.npu_artifact(tmp_path, monkeypatch, mesh, {"buckets": (1,), "num_speculative_tokens": 3}, **bringups.TWO_LAYERS)
    results = bringups.ladder(artifact, wanted=runnable).run()
    assert [(result.name, result.failures, result.finished) for result in results] == [(name, [], True) for name in runnable]
    assert {result.name: result for result in results}["collectives"].facts["collectives"] > 0
