"""tools/prove/bringup/results.py: a rung passes without failures, and a failure carries the heading of its assumption."""

from __future__ import annotations

import pytest

from npucompile.tools.prove.bringup.results import Failure


def test_an_assumption_must_be_one_of_the_page():
    with pytest.raises(KeyError):
        Failure("bad-luck", "", "").as_dict()
