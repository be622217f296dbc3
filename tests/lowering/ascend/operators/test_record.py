"""lowering/ascend/operators: records agree with each other and with what CANN is known to have."""

from __future__ import annotations

import re

import pytest

from npucompile.lowering.ascend.legality.table import table
from npucompile.lowering.ascend.legality.torch_operators import torch_operators
from npucompile.lowering.ascend.operators.table import (
    BY_TARGET,
    BY_TYPE,
    COMMUNICATING,
    COMMUNICATING_TARGETS,
    FORMS,
    GROUP_FUNCTIONS,
    GROUP_KERNELS,
    OPERATORS,
)


def test_a_name_is_of_one_operator():
    kinds = [kind for operator in OPERATORS for kind in (*operator.ge, *operator.acl)]
    overloads = [form.name for operator in OPERATORS for form in operator.torch]
    assert (len(kinds), len(overloads)) == (len(BY_TYPE), len(BY_TARGET))


def test_what_runs_on_a_group_communicates():
    assert COMMUNICATING.keys() >= GROUP_FUNCTIONS.keys()
    assert COMMUNICATING_TARGETS.keys() >= GROUP_KERNELS.keys()
    assert all((form.group is not None) == bool(BY_TARGET[name].collective) for name, form in FORMS.items())


def test_the_combine_that_adds_and_normalises_is_a_combine():
    fused, plain = BY_TYPE["MoeDistributeCombineAddRmsNorm"], BY_TYPE["MoeDistributeCombineV2"]
    assert (fused.collective, fused.own_group, fused.exchange) == (plain.collective, plain.own_group, plain.exchange)


def test_whatever_the_table_of_legal_operators_has_with_a_communicator_is_recorded():
    kinds = {kind for kind in table().by_operator if kind.startswith(("Hcom", "MoeDistribute"))}
    overloads = {name for name, row in torch_operators().items() if re.search(r"str (hcom|group)", row.schema)}
    assert kinds
    assert overloads
    assert kinds <= COMMUNICATING.keys()
    assert overloads <= COMMUNICATING_TARGETS.keys()


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form.group is not None], ids=lambda form: form.name)
def test_a_position_is_not_that_of_another_argument(form):
    places = [place for place in (form.group[0], form.size, form.rank) if place is not None]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form.in_place], ids=lambda form: form.name)
def test_a_form_that_writes_in_place_is_of_the_same_operator(form):
    assert BY_TARGET[form.in_place] is BY_TARGET[form.name]
    assert form.pools
