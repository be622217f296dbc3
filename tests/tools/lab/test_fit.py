"""tools/lab/fit.py: parameters come back from what they predict."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from npucompile.tools.advisor.plan.parameters import NAMES, PlanParameters, fitted, priors
from npucompile.tools.lab.fit import fit

WEIGHTS = {f"row{i}": [((i * 7 + j * 5 + k) % 4) + 0.1 for j in range(16) for k in range(3)] for i in range(12)}


def toy(name: str, parameters: PlanParameters) -> dict[str, float]:
    """Sums of powers of the parameters, which differ from row to row."""
    values = list(asdict(parameters).values())
    weights = WEIGHTS[name]
    return {
        key: sum(weights[3 * j + k] * (values[j] / getattr(priors(), NAMES[j])) ** 0.7 for j in range(16))
        for k, key in enumerate(("tpot_ms", "output_tok_s", "ttft_ms"))
    }


def rows(true: PlanParameters) -> dict[str, dict[str, float]]:
    return {name: toy(name, true) for name in WEIGHTS}


def test_what_is_determined_is_found_and_outliers_do_not_matter():
    true = PlanParameters(**{name: value * 1.15 for name, value in asdict(priors()).items()})
    found = fit(toy, rows(true), priors(), priors())
    for name in WEIGHTS:
        assert toy(name, found.parameters)["tpot_ms"] == pytest.approx(toy(name, true)["tpot_ms"], rel=0.01)
    wrong = rows(true)
    wrong["row3"]["tpot_ms"] *= 100
    again = fit(toy, wrong, priors(), priors())
    assert toy("row5", again.parameters)["tpot_ms"] == pytest.approx(toy("row5", true)["tpot_ms"], rel=0.03)


def test_without_rows_the_priors_stay_and_their_width_is_the_deviation():
    found = fit(toy, {}, priors(), fitted())
    assert asdict(found.parameters) == pytest.approx(asdict(priors()), rel=1e-3)
    assert found.deviations["host_ms"] == pytest.approx(0.35)
