"""tools/prove/bringup/operator_rules.py: rules are of operators that exist, and name assumptions that are documented."""

from __future__ import annotations

from npucompile.lowering.ascend.operators.table import FUNCTIONS, GROUP_FUNCTIONS
from npucompile.tools.prove.bringup.operator_rules import LAST, RULES, rules_of
from npucompile.tools.prove.bringup.risks import ASSUMPTIONS


def test_operators_with_a_risk_exist_and_their_assumptions_are_documented():
    risky = {op_type for op_type, rules in RULES.items() if rules.wrong != "kernels" or rules.refused != "compiles" or rules.order < LAST}
    assert risky <= {*FUNCTIONS, *GROUP_FUNCTIONS}
    named = {name for rules in (*RULES.values(), rules_of("Unknown")) for name in (rules.wrong, rules.refused, rules.layer) if name}
    assert named <= set(ASSUMPTIONS)


def test_operators_of_one_risk_each_have_a_place_of_their_own():
    places = sorted(rules.order for rules in RULES.values() if rules.order < LAST)
    assert places == list(range(len(places)))
    assert places


def test_an_operator_without_rules_is_about_compilers_and_kernels():
    assert (rules_of("MatMul").refused, rules_of("MatMul").wrong, rules_of("FusedInferAttentionScore").refused) == (
        "compiles", "kernels", "attention",
    )  # fmt: skip
