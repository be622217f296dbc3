"""tools/build/choices.py: the constants of the command line equal what they stand for."""

from __future__ import annotations

from npucompile.models.variant import SCHEMES
from npucompile.tools.build import choices, plan, targets


def test_choices_are_what_they_name() -> None:
    assert tuple(plan.DTYPES) == choices.DTYPES
    assert choices.TARGETS == targets.TARGETS
    assert tuple(SCHEMES) == choices.SCHEMES
