"""tools/prove/bringup/children.py: what ends a process is the finding of its case. test_rungs.py has a device that does not open."""

from __future__ import annotations

import os

import pytest
from support import faulty
from support.faulty import Ends

from npucompile.lowering.ascend.emulator.device import VERSION
from npucompile.tools.prove.bringup.child import Cases
from npucompile.tools.prove.bringup.children import Children
from npucompile.tools.ranks.rank_settings import RankSettings

LIMIT_S, SILENT_S = 60.0, 3.0
"""How long a process may say nothing while it starts, and in a case."""


@pytest.fixture
def run(small_artifact, tmp_path):
    made = []

    def judged(cases):
        found = []
        settings = RankSettings(device="emulated")

        def add(finding):
            found.append(finding)
            # A process that has judged a case has started, which is all that takes long here.
            made[-1]._limit_s = SILENT_S if finding.timings else LIMIT_S

        made.append(Children(small_artifact, settings, 0, faulty.CHILDREN, LIMIT_S, tmp_path, add))

        def remaining():
            left = tuple(case for case in cases if case.name not in {finding.case for finding in found})
            return Cases("operators", left) if left else None

        return made[-1].run(remaining, "operators"), found, made[-1].version

    yield judged
    for children in made:
        children.kill()


def test_each_way_to_end_is_the_finding_of_its_case_and_the_next_process_goes_on(run):
    ways = {"hangs": faulty.hangs, "aborts": os.abort, "exits": faulty.exits}
    done, found, version = run([Ends("a"), *(Ends(name, how) for name, how in ways.items()), Ends("z")])
    assert (done, version) == (True, VERSION)
    assert [finding.case for finding in found] == ["a", *ways, "z"]
    codes = [failure.code for finding in found for failure in finding.failures]
    assert codes == ["silent", "SIGABRT", "EZ9999"]
    assert SILENT_S <= found[1].seconds < LIMIT_S
    assert [len(finding.timings) for finding in found] == [1, 0, 0, 0, 1]
