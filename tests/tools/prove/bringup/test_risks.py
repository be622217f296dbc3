"""tools/prove/bringup/risks.py: short names are those of docs/on-hardware.md, and operators are mapped to them."""

from __future__ import annotations

import re
from pathlib import Path

from support import ge_calls as gc

from npucompile.lowering.ascend.emulator.ge_ops_group import GROUP_FUNCTIONS
from npucompile.lowering.ascend.emulator.ge_program import FUNCTIONS
from npucompile.tools.prove.bringup.risks import _BY_TYPE, _REFUSALS, ASSUMPTIONS, ORDER, of_refusal, of_wrong_result

PAGE = Path(__file__).parents[3] / "docs" / "on-hardware.md"


def test_the_page_and_the_code_have_the_same_rows_and_risks_by_the_same_names():
    text = PAGE.read_text()
    rows = text[text.index("## What is not") : text.index("## The checklist")]
    named = re.findall(r"^(?:\| |\d+\. )\*\*(.+?)\*\* \(`([\w-]+)`\)", rows, re.MULTILINE)
    assert {name: heading for heading, name in named} == dict(ASSUMPTIONS)
    assert len(re.findall(r"^(?:\| |\d+\. )\*\*", rows, re.MULTILINE)) == len(ASSUMPTIONS)


def test_every_type_with_a_risk_of_its_own_exists():
    assert {*_BY_TYPE, *ORDER} <= {*FUNCTIONS, *GROUP_FUNCTIONS}
    assert set(_BY_TYPE.values()) <= set(ASSUMPTIONS)


def test_a_refused_operator_is_about_the_risk_of_its_type():
    assert set(_REFUSALS) <= {*FUNCTIONS, *GROUP_FUNCTIONS}
    assert set(_REFUSALS.values()) <= set(ASSUMPTIONS)
    assert of_refusal(gc.call("FusedInferAttentionScore").op) == "attention"
    assert of_refusal(gc.call("MatMul").op) == "compiles"


def test_a_wrong_product_is_about_nz_only_where_that_is_the_difference():
    op = gc.call("GroupedMatmul").op
    assert (of_wrong_result(op, True), of_wrong_result(op, False)) == ("nz-weights", "grouped-products")
