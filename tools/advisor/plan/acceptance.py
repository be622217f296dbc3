"""How many drafts are accepted where nobody has measured it: from published rows of the same model."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from ...builder.deployments import deployment
from .measurements import measured
from .products import Array

DEFAULT_CHANCE = 0.765
"""Chance that a draft is accepted, if the one before it was: 2.8 tokens a step with three drafts, the middle of published rows."""
_SPREAD = 0.075
_SPREAD_OF = {"qwen3-235b-a22b": 0.20}
"""Coefficient of variation over requests of the acceptance length, over that length less one; fit to published tails of TPOT."""


def tokens_a_step(chance: float, drafts: int) -> float:
    """Expected tokens of a step whose drafts are each accepted with this chance if all before were."""
    return sum(chance**i for i in range(drafts + 1))


def chance_of(accepted: float, drafts: int) -> float:
    """The inverse of `tokens_a_step`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_step(middle, drafts) < accepted else (low, middle)
    return low


def accepted_of(model: str, drafts: int, input_len: float, output_len: float, known: Collection[str] | None) -> tuple[float, str]:
    """Tokens a step, and where the figure comes from.

    The published row of the same model whose lengths are nearest gives the chance that a draft is accepted. Prompts of random tokens
    differ from text, and lengths decide how much of a request is either, so nearness is of both lengths.

    Args:
        known: ids of rows that may be used; None for all.
    """
    rows = [
        (
            abs(math.log(row.input_len / input_len)) + abs(math.log(row.output_len / output_len)) + 0.1 * abs(k - drafts),
            name,
            own.accepted,
            k,
        )
        for name, own in measured().items()
        if own.accepted and (known is None or name in known)
        for row in [deployment(name)]
        for k in [row.num_speculative_tokens]
        if row.model == model and row.input_len and row.output_len
    ]
    if not rows:
        accepted = tokens_a_step(DEFAULT_CHANCE, drafts)
        return accepted, f"{accepted:.2f} tokens a step: drafts accepted with chance {DEFAULT_CHANCE}, as nothing is published of {model}"
    _, name, own, k = min(rows)
    accepted = own if k == drafts else tokens_a_step(chance_of(own, k), drafts)
    return accepted, f"{accepted:.2f} tokens a step, as {name} has"


def spread_of(model: str, accepted: float) -> float:
    """Coefficient of variation of tokens a step over requests."""
    return _SPREAD_OF.get(model, _SPREAD * (accepted - 1))


def per_request(accepted: float, spread: float, drafts: int, requests: int) -> Array:
    """Tokens a step of each request: quantiles of a normal distribution in a fixed random order, whose harmonic mean is `accepted`."""
    if not drafts or spread == 0:
        return np.full(requests, accepted)
    places = (np.arange(requests) + 0.5) / requests
    values = np.clip(accepted * (1 + spread * _normal_quantile(places)), 1.0, drafts + 1.0)
    for _ in range(8):
        values = np.clip(values * accepted * np.mean(1 / values), 1.0, drafts + 1.0)
    result: Array = np.random.default_rng(0).permutation(values)
    return result


def _normal_quantile(p: Array) -> Array:
    """Within 4.5e-4: Abramowitz and Stegun, 26.2.23."""
    t = np.sqrt(-2 * np.log(np.minimum(p, 1 - p)))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    value = t - top / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    result: Array = np.where(p < 0.5, -value, value)
    return result
