"""lowering/machines.py: each nameplate fact has a unit and a source, and everybody who needs one reads this one."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.machines import GIB, NPUS, Npu, facts, npu
from npucompile.tools.advisor.plan.published import machine_of
from npucompile.tools.builder.targets import TARGETS, target


@pytest.mark.parametrize("chip", NPUS)
def test_each_fact_has_a_unit_and_a_source(chip):
    known = facts(chip)
    assert set(known) == {field.name for field in fields(Npu)} - {"chip"}
    for fact in known.values():
        assert fact.value > 0
        assert fact.unit
        assert len(fact.source) > 10


@pytest.mark.parametrize("name", [name for name in TARGETS if not target(name).local])
def test_targets_costs_and_predictions_have_the_same_machine(name):
    kind = target(name)
    machine, costs, predicted = NPUS[kind.chip], parameters(kind.chip), machine_of(name)
    common = {field.name for field in fields(costs)} & set(facts(kind.chip))
    assert len(common) == 10
    assert {name: asdict(costs)[name] for name in common} == {name: asdict(machine)[name] for name in common}
    assert kind.npu is machine
    assert predicted.npu is machine
    assert machine.usable_hbm_bytes < machine.hbm_bytes == 64 * GIB


def test_an_unknown_chip_is_refused():
    with pytest.raises(SpecError, match="chip 'h100'; legal are ascend910_93, ascend910b"):
        npu("h100")
