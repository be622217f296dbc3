"""tools/build/choices.py: the constants of the command line equal what they stand for."""

from __future__ import annotations

from npucompile.lowering import platform
from npucompile.models.quant.recipes import SCHEMES
from npucompile.tools.build import choices, dtype_choice, targets


def test_choices_are_what_they_name() -> None:
    assert tuple(dtype_choice.DTYPES) == choices.DTYPES
    assert choices.TARGETS == targets.TARGETS
    assert tuple(SCHEMES) == choices.SCHEMES
    assert choices.CANN_RELEASES == platform.CANN_RELEASES
    assert choices.OPERATOR_PACKAGES == platform.OPERATOR_PACKAGES
