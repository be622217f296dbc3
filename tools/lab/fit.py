"""Fits the parameters to measurements: least squares in logarithms with priors, robust against outliers.

A Gauss-Newton step with Levenberg's damping over 19 parameters needs a dozen lines of numpy, so scipy is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..advisor.plan.parameters import NAMES, PlanParameters, as_logs, of_logs, sigmas
from ..advisor.plan.products import Array

SIGMAS = {"tpot_ms": 0.05, "output_tok_s": 0.05, "ttft_ms": 0.25, "step_ms": 0.05, "floor_tpot_ms": 0.15, "floor_tok_s": 0.15}
"""What a prediction of each may miss by, as a logarithm; TTFT of saturated prefill moves by half with 5 % of the rate. Of floors of tests
neither the tokens a step nor how many requests are published."""
_STEP = 0.04
_CAUCHY = 2.0
"""Residuals over so many sigmas count less and less."""

Figures = Mapping[str, float]
"""Some of `SIGMAS` by name; others are not fitted."""

Model = Callable[[str, PlanParameters], Figures]
"""What is predicted of a row."""


@dataclass(frozen=True)
class Fit:
    """Parameters, and how well each is determined.

    Attributes:
        deviations: standard deviation of each one's logarithm, from the curvature at the optimum.
        jacobian: of the residuals, rows by name.
    """

    parameters: PlanParameters
    deviations: Mapping[str, float]
    jacobian: Mapping[str, Array]
    cost: float


def residuals(predicted: Figures, actual: Figures) -> Array:
    """Logarithms of predicted over measured, in sigmas, of the figures that were measured."""
    return np.asarray([math.log(predicted[name] / actual[name]) / sigma for name, sigma in SIGMAS.items() if name in actual])


def fit(
    model: Model,
    rows: Mapping[str, Figures],
    prior: PlanParameters,
    start: PlanParameters,
    iterations: int = 20,
) -> Fit:
    """The parameters that explain the rows."""
    x, x0 = np.asarray(as_logs(start)), np.asarray(as_logs(prior))
    at = {name: residuals(model(name, of_logs(x.tolist())), actual) for name, actual in rows.items()}
    best, damping = _cost(at.values(), x, x0), 1e-2
    slopes = _jacobian(model, rows, x, at)
    for _ in range(iterations):
        moved = False
        for _ in range(5):
            candidate = x + _direction(slopes, at, x, x0, damping)
            trial = {name: residuals(model(name, of_logs(candidate.tolist())), actual) for name, actual in rows.items()}
            cost = _cost(trial.values(), candidate, x0)
            if cost < best - 1e-3:
                x, at, best, damping, moved = candidate, trial, cost, damping / 4, True
                break
            damping *= 5
        if not moved:
            break
        slopes = _jacobian(model, rows, x, at)
    curvature = _normal(slopes, at)[0] + np.diag(1 / np.asarray(sigmas()) ** 2)
    deviations = np.sqrt(np.diag(np.linalg.inv(curvature)))
    return Fit(of_logs(x.tolist()), dict(zip(NAMES, deviations.tolist(), strict=True)), slopes, best)


def _weights(residual: Array) -> Array:
    result: Array = 1 / (1 + (residual / _CAUCHY) ** 2)
    return result


def _cost(every: Iterable[Array], x: Array, x0: Array) -> float:
    loss = sum(float((_CAUCHY**2 * np.log1p((r / _CAUCHY) ** 2)).sum()) for r in every)
    return loss + float((((x - x0) / np.asarray(sigmas())) ** 2).sum())


def _jacobian(model: Model, rows: Mapping[str, Figures], x: Array, at: Mapping[str, Array]) -> dict[str, Array]:
    slopes = {name: np.zeros((len(residual), len(x))) for name, residual in at.items()}
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += _STEP
        parameters = of_logs(moved.tolist())
        for name, actual in rows.items():
            slopes[name][:, i] = (residuals(model(name, parameters), actual) - at[name]) / _STEP
    return slopes


def _normal(slopes: Mapping[str, Array], at: Mapping[str, Array]) -> tuple[Array, Array]:
    size = len(NAMES)
    matrix, vector = np.zeros((size, size)), np.zeros(size)
    for name, residual in at.items():
        weight = _weights(residual)
        slope = slopes[name]
        matrix += slope.T @ (weight[:, None] * slope)
        vector += slope.T @ (weight * residual)
    return matrix, vector


def _direction(slopes: Mapping[str, Array], at: Mapping[str, Array], x: Array, x0: Array, damping: float) -> Array:
    matrix, vector = _normal(slopes, at)
    matrix = matrix + np.diag(1 / np.asarray(sigmas()) ** 2)
    vector = vector + (x - x0) / np.asarray(sigmas()) ** 2
    step: Array = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), vector)
    return np.clip(step, -0.4, 0.4)
