"""lowering/ascend/communicating.py: one record says which operators exchange data, and every other table of them is a part of it."""

from __future__ import annotations

import re

import pytest

from npucompile.lowering.ascend.acl_graph.file import GROUP_ARGUMENTS
from npucompile.lowering.ascend.communicating import BY_TARGET, BY_TYPE, FORMS, RECORDS
from npucompile.lowering.ascend.cost import work
from npucompile.lowering.ascend.emulator.ge_ops_group import GROUP_FUNCTIONS
from npucompile.lowering.ascend.emulator.npu_reference import GROUP_KERNELS
from npucompile.lowering.ascend.legality.table import table
from npucompile.lowering.ascend.legality.torch_operators import torch_operators


def test_every_operator_that_something_runs_on_a_group_is_recorded():
    assert BY_TYPE.keys() >= {*GROUP_FUNCTIONS, *work._COLLECTIVES}
    assert BY_TARGET.keys() >= GROUP_KERNELS.keys()
    assert GROUP_ARGUMENTS.keys() == FORMS.keys() == BY_TARGET.keys()


def test_the_combine_that_adds_and_normalises_is_a_combine():
    assert BY_TYPE["MoeDistributeCombineAddRmsNorm"] is BY_TYPE["MoeDistributeCombineV2"]


def test_whatever_the_table_of_legal_operators_has_with_a_communicator_is_recorded():
    kinds = {kind for kind in table().by_operator if kind.startswith(("Hcom", "MoeDistribute"))}
    overloads = {name for name, row in torch_operators().items() if re.search(r"str (hcom|group)", row.schema)}
    assert kinds
    assert overloads
    assert kinds <= BY_TYPE.keys()
    assert overloads <= BY_TARGET.keys()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.collective)
def test_a_position_is_not_that_of_another_argument(record):
    for form in record.torch:
        places = [place for place in (form.group[0], form.size, form.rank) if place is not None]
        assert len(set(places)) == len(places)
