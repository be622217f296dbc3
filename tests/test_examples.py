"""Tests of tests/support/examples.py, which decides how many examples a property test runs."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support import examples


@pytest.mark.parametrize("profile, runs", [("ci", {1: 1, 4: 4, 30: 5, 60: 6, 400: 40}), ("long", {1: 1, 4: 4, 30: 30, 60: 60, 400: 400})])
def test_a_profile_runs_its_share_of_the_examples_that_a_test_names(profile, runs):
    before = settings.get_current_profile_name()
    settings.load_profile(profile)
    try:
        assert {named: examples.share(named) for named in runs} == runs
    finally:
        settings.load_profile(before)


def test_a_property_runs_its_share():
    drawn = []

    @settings(max_examples=600)
    @given(st.integers())
    def test(number):
        drawn.append(number)

    examples.scale(test)
    test()
    assert len(drawn) == examples.share(600)


def test_a_property_that_names_no_number_runs_that_of_the_profile():
    drawn = []

    @given(st.integers())
    def test(number):
        drawn.append(number)

    examples.scale(test)
    test()
    assert len(drawn) == settings.default.max_examples


def test_a_state_machine_runs_its_share():
    class Machine(RuleBasedStateMachine):
        @rule()
        def step(self):
            pass

    Machine.TestCase.settings = settings(max_examples=600, stateful_step_count=2)
    examples.scale(Machine.TestCase)
    assert (Machine.TestCase.settings.max_examples, Machine.TestCase.settings.stateful_step_count) == (examples.share(600), 2)


def test_the_seed_of_the_run_is_said(request):
    assert examples.repeated_by(request.config).endswith(f" --hypothesis-seed={request.config.option.hypothesis_seed}")


@pytest.mark.short_cases("one", "three")
@pytest.mark.parametrize("number", [1, 2, 3], ids=["one", "two", "three"])
def test_cases_that_are_not_short_are_long(number, request):
    assert (request.node.get_closest_marker("long") is None) == (number != 2)


def test_short_cases_that_are_none_are_refused():
    marked = []
    markers = [pytest.mark.short_cases("a").mark]
    items = [
        SimpleNamespace(name=name, nodeid=name, iter_markers=lambda _: markers, add_marker=marked.append) for name in ("test[b]", "test[c]")
    ]
    with pytest.raises(pytest.UsageError, match=re.escape("test[b]: short_cases names ['a']; legal are ['b', 'c']")):
        examples.mark_long_cases(items)
    assert marked == [pytest.mark.long] * 2


def test_what_ran_is_counted(request):
    def report(**keywords):
        return SimpleNamespace(when="call", keywords=keywords)

    stats = {"passed": [report(), report(long=1)], "skipped": [report(long=1)], "warnings": [report()]}
    said = examples.what_ran(stats, request.config)
    assert said.startswith("ran 2 passed, 0 failed, 0 error, 1 skipped; 1 of these tests are long; --hypothesis-profile=")
