"""lowering/ascend/cost/parameters.py: every speed of both chips has a unit and a source, and an unknown chip is refused."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.cost.parameters import parameters, sources
from npucompile.tools.build.targets import target


@pytest.mark.parametrize("name", ["ascend-a3", "ascend-a2"])
def test_each_value_has_a_unit_and_a_source_and_agrees_with_the_target(name):
    """A target states the same machine's nameplate speeds, for its memory plan and its roofline."""
    machine = target(name)
    speeds = parameters(machine.chip)
    for entry in sources(machine.chip).values():
        assert set(entry) == {"value", "unit", "source"}
        assert entry["value"] > 0
        assert len(entry["source"]) > 10
    assert speeds.npus_per_node == machine.npus_per_node
    assert speeds.hbm_bytes_per_s == machine.hbm_bytes_per_s
    assert speeds.link_bytes_per_s == machine.link_bytes_per_s
    for ours, theirs in (
        (speeds.bf16_ops_per_s, machine.bf16_flops_per_s),
        (speeds.int8_ops_per_s, machine.int8_ops_per_s),
        (speeds.node_link_bytes_per_s, machine.node_link_bytes_per_s),
    ):
        assert theirs is not None
        assert ours == pytest.approx(theirs, rel=0.04)


@pytest.mark.parametrize("chip", ["", "common", "h100"])
def test_an_unknown_chip_is_refused(chip):
    with pytest.raises(SpecError, match=r"legal are ascend910_93, ascend910b"):
        parameters(chip)
