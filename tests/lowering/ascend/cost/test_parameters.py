"""lowering/ascend/cost/parameters.py: every speed of both chips has a unit and a source, and an unknown chip is refused."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.cost.parameters import parameters, sources
from npucompile.lowering.machines import NPUS


@pytest.mark.parametrize("chip", NPUS)
def test_each_value_has_a_unit_and_a_source(chip):
    for entry in sources(chip).values():
        assert set(entry) == {"value", "unit", "source"}
        assert entry["value"] > 0
        assert len(entry["source"]) > 10


@pytest.mark.parametrize("chip", ["", "common", "h100"])
def test_an_unknown_chip_is_refused(chip):
    with pytest.raises(SpecError, match=r"legal are ascend910_93, ascend910b"):
        parameters(chip)
