"""lowering/ascend/legality/table.py: every row says where it can be read or why it is assumed, and malformed rows are refused by number."""

from __future__ import annotations

import re

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.legality.table import CHIPS, DTYPES, FORM, RULE, TYPES, read, release, table
from npucompile.lowering.ascend.legality.torch_operators import torch_operators
from npucompile.lowering.ascend.operators.legality_rules import rule_of
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.platform import CANN_RELEASES

CALLED = {row.runs: name for name, row in torch_operators().items()}
ROW = {"operators": ["Exp"], "what": "types", "columns": 2, "inputs": {"x": "f32 bf16"}, "outputs": {"y": "f32 bf16"}, "source": "here"}


def test_rows_of_the_table_are_complete():
    """A commit and a release for every public repository; a form and types for whatever has rules; known rules with the right limits."""
    rows = table().rows
    assert len(rows) > 250
    for row in rows:
        for repository in re.findall(r"(?:hicann|Ascend|vllm-project)/[\w-]+@?\w*", row.source):
            assert re.search(r"@[0-9a-f]{7}", repository) or "/issues/" in row.source or "/pull/" in row.source or "issue" in row.source, (
                row
            )
        for kind in row.operators if row.what == RULE else ():
            assert set(row.parameters) <= set(rule_of(Node("n", kind, called=CALLED.get(kind, "")), row.rule).__code__.co_varnames), row
    formed = {name for name, facts in table().by_operator.items() if any(fact.what == FORM for fact in facts)}
    assert formed == set(table().by_operator), "an operator has facts and no form"
    assert not {name for name in formed if not any(fact.what in (TYPES, DTYPES) for fact in table().by_operator[name])}


def test_columns_name_inputs_and_outputs_of_the_form():
    for name, facts in table().by_operator.items():
        form = next(fact for fact in reversed(facts) if fact.what == FORM)
        for fact in facts:
            for column in (*fact.columns[:1], fact.dtypes):
                inputs = {entry for entry in column if not entry.startswith("->")}
                assert inputs <= set(form.inputs), (name, inputs - set(form.inputs))


def test_facts_of_a_release_and_a_chip():
    """Grouped int4 weights with float scales came with 8.5; the float32 state of the delta rule is of an operator package."""
    for newer in ("GroupedMatmulSwigluQuantV2", "RecurrentGatedDeltaRule"):
        assert not [fact for fact in table().facts(newer, "ascend910_93", "8.3") if fact.what == FORM]
    of_8_3 = table().facts("AddRmsNormDynamicQuant", "ascend910_93", "8.3")
    assert {column["->y1"] for fact in of_8_3 for column in fact.columns} == {"i8"}, "4-bit results came later"
    for chip in CHIPS:
        for cann in CANN_RELEASES[1:]:
            assert [fact for fact in table().facts("GroupedMatmulSwigluQuantV2", chip, cann) if fact.what == FORM]
    states = {}
    for packages in ((), ("vllm-ascend",)):
        facts = table().facts("RecurrentGatedDeltaRule", "ascend910_93", "9.1", packages)
        states[packages] = {column["state"] for fact in facts for column in fact.columns}
    assert states == {(): {"bf16"}, ("vllm-ascend",): {"bf16", "f32"}}
    assert release("8.5.0.alpha001") == release("8.5") < release("9.0") < release("9.1.RC1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "hearsay"}, "is of no known kind; legal are form, types, dtypes, folded, rule"),
        ({"source": ""}, "needs a source or the reason for which it is assumed"),
        ({"assumed": "a guess"}, "needs a source or the reason for which it is assumed, and not both"),
        ({"colour": "blue"}, "has the fields .*'colour'.*; legal are"),
        ({"chips": ["ascend310p"]}, r"is for chips \('ascend310p',\)"),
        ({"since": "7.0"}, "releases '7.0' to ''"),
        ({"package": "other"}, "is for package 'other'"),
        ({"columns": 3}, "has 3 columns, and another number of entries for x, ->y"),
    ],
)
def test_malformed_rows_are_refused(change, message):
    with pytest.raises(LoweringError, match=rf"row 0 of the legality table \(\['Exp'\].*{message}"):
        read([{**ROW, **change}])


def test_one_entry_stands_for_all_columns():
    row = read([{**ROW, "inputs": {"x": "f32"}}]).rows[0]
    assert row.columns == ({"x": "f32", "->y": "f32"}, {"x": "f32", "->y": "bf16"})
