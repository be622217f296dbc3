"""tools/prove/bringup/results.py: a rung passes without failures, and a failure carries the heading of its assumption."""

from __future__ import annotations

import pytest

from npucompile.tools.prove.bringup.results import Failure, RungResult


def test_a_rung_passes_unless_something_failed():
    rung = RungResult("layers", 1.5)
    assert (rung.passed, rung.as_dict()["passed"]) == (True, True)
    rung.failures.append(Failure("kv-writes", "layer00", "other values"))
    plain = rung.as_dict()
    assert (plain["name"], plain["passed"], plain["seconds"]) == ("layers", False, 1.5)
    assert plain["failures"] == [{"assumption": "kv-writes", "what": "layer00", "message": "other values", "heading": "KV writes."}]


def test_an_assumption_must_be_one_of_the_page():
    with pytest.raises(KeyError):
        Failure("bad-luck", "", "").as_dict()
