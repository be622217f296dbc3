"""What `make test` runs of what `make test-long` runs: few examples of a property, drawn anew each time, and few cases of long tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The examples of a test that names no number; a number that a test names is what `long` runs, and `ci` runs the same share of it.
LONG, CI = 100, 10
FEWEST = 5

# Speed of a machine that other processes use is no matter of a test.
_COMMON: Any = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}


def register() -> None:
    """Makes both profiles known (`--hypothesis-profile`), and takes `ci`."""
    settings.register_profile("long", max_examples=LONG, **_COMMON)
    settings.register_profile("ci", max_examples=CI, **_COMMON)
    settings.load_profile("ci")


def share(examples: int) -> int:
    """Examples that the present profile runs of a test that names so many."""
    return max(min(examples, FEWEST), examples * settings.default.max_examples // LONG)


def scale(test: Any) -> None:
    """Gives a property test, or a state machine's test case, its share; to be called once."""
    # Hypothesis has no public way to change the settings of a decorated test.
    name = "settings" if isinstance(test, type) else "_hypothesis_internal_use_settings"
    named = getattr(test, name, None)
    # A test that names no number has that of the profile already.
    if isinstance(named, settings) and named.max_examples != settings.default.max_examples:
        setattr(test, name, settings(named, max_examples=share(named.max_examples)))


def scale_all(items: Iterable[pytest.Item]) -> None:
    """`scale` for every property among the collected tests, of which parametrised ones share a function."""
    tests = {}
    for item in items:
        if isinstance(item, pytest.Function):
            machine = item.cls if hasattr(item.cls, "runTest") else None
            test = machine or getattr(item.obj, "__func__", item.obj)
            tests[id(test)] = test
    for test in tests.values():
        scale(test)


def mark_long_cases(items: Iterable[pytest.Item]) -> None:
    """Marks every case of a test with `short_cases` as long, but for those that it names."""
    cases: dict[str, set[str]] = {}
    for item in items:
        for marker in item.iter_markers("short_cases"):
            own = item.name.partition("[")[2].removesuffix("]")
            cases.setdefault(item.nodeid.partition("[")[0], set()).add(own)
            if own not in marker.args:
                item.add_marker(pytest.mark.long)
    for item in items:
        for marker in item.iter_markers("short_cases"):
            there = cases[item.nodeid.partition("[")[0]]
            # Who asks for one case by its id collects no other.
            if len(there) > 1 and not set(marker.args) <= there:
                raise pytest.UsageError(f"{item.nodeid}: short_cases names {sorted(set(marker.args) - there)}; legal are {sorted(there)}")


def seed(config: pytest.Config) -> str:
    """The seed of this run's examples, drawn unless `--hypothesis-seed` gives it; workers take the controller's."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(10**9))
    return str(config.option.hypothesis_seed)


def repeated_by(config: pytest.Config) -> str:
    """The options that draw the same examples again."""
    return f"--hypothesis-profile={settings.get_current_profile_name()} --hypothesis-seed={seed(config)}"


def what_ran(stats: Mapping[str, Sequence[Any]], config: pytest.Config) -> str:
    """One sentence: outcomes of tests by number, how many of them are long, and how examples were drawn."""
    outcomes = {kind: [report for report in stats.get(kind, ()) if report.when] for kind in ("passed", "failed", "error", "skipped")}
    numbers = ", ".join(f"{len(reports)} {kind}" for kind, reports in outcomes.items())
    long = sum("long" in report.keywords for kind in ("passed", "failed") for report in outcomes[kind])
    return f"ran {numbers}; {long} of these tests are long; {repeated_by(config)}"
