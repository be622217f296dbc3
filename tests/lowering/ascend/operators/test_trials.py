"""lowering/ascend/operators/trials.py: trials name assumptions that are documented, and have an order; operands.py's tests draw by them."""

from __future__ import annotations

from npucompile.lowering.ascend.operators.table import OPERATORS
from npucompile.lowering.ascend.operators.trials import LAST
from npucompile.tools.prove.bringup.risks import ASSUMPTIONS

TRIALS = [operator.trial for operator in OPERATORS]


def test_assumptions_of_operators_are_documented():
    assert {name for trial in TRIALS for name in (trial.wrong, trial.refused, trial.layer) if name} <= set(ASSUMPTIONS)


def test_operators_with_a_risk_each_have_a_place_of_their_own():
    places = sorted(trial.order for trial in TRIALS if trial.order < LAST)
    assert places == list(range(13))
