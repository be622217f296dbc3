"""tools/prove/bringup/on_all_ranks.py: what a lost rank was about is found, and what other ranks see."""

from __future__ import annotations

import pytest
from support import bringups, faulty
from support.faulty import Opens, OpensOnce

from npucompile.lowering.ascend.emulator.fault import ABORTS, RAISES, Fault


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return bringups.small_artifact(tmp_path_factory, "tp=2")


@pytest.fixture(scope="module")
def seen_by_the_second(two_ranks):
    """A bring-up of which no rank is lost."""
    return bringups.ladder(two_ranks, Opens(faulty.wrong_on_the_second), ["collectives"]).run()


def outcome(results):
    return [(result.name, result.finished, [failure.what for failure in result.failures]) for result in results]


@pytest.mark.short_cases("raises")
@pytest.mark.parametrize("kind", [ABORTS, RAISES])
def test_a_collective_in_which_a_rank_fails_is_named_and_the_others_are_run(two_ranks, seen_by_the_second, tmp_path, kind):
    # The environment has opened the first device; one of the ranks has the second.
    opens = OpensOnce(tmp_path, {1: Fault(2, kind)})
    results = bringups.ladder(two_ranks, opens, ["collectives"]).run()
    (name, finished, (what,)) = outcome(results)[0]
    assert (name, finished) == ("collectives", True)
    struck = [step for step in opens.steps() if step["device"] == 1][-1]
    assert set(what.split()) & set(struck["names"])
    assert results[0].facts.keys() == seen_by_the_second[0].facts.keys()
    assert results[0].facts["collectives"] == seen_by_the_second[0].facts["collectives"]


def test_what_another_rank_alone_sees_is_a_finding_too(seen_by_the_second):
    (result,) = seen_by_the_second
    assert result.finished
    assert result.facts["collectives"] > 1
    assert {failure.assumption for failure in result.failures} == {"communicators"}
    assert all("HcomAllGather" in failure.what for failure in result.failures)
    assert all(failure.message.startswith("rank 1: ") for failure in result.failures)


def test_what_cannot_get_ready_keeps_the_rungs_behind_it_from_running(small_artifact):
    results = bringups.ladder(small_artifact, faulty.refuses_on_all_ranks, ["buckets", "serve"]).run()
    assert outcome(results) == [("buckets", False, ["getting ready"])]
