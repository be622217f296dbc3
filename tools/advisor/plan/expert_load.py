"""What a placement of experts that is planned from counts gains a deployment: its prediction under either, and with copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....graphs.errors import SpecError
from ....models.expert_placement import by_default
from ....models.registry import find
from ...builder import expert_map
from ...builder.expert_planner import imbalance
from .parameters import PlanParameters
from .predict import Prediction, predict
from .system import LoadCase

COPIES = 1
"""Copied experts of each rank, of the last placement."""


@dataclass(frozen=True)
class ExpertLoad:
    """One placement.

    Attributes:
        imbalance: tokens of the busiest rank over the mean.
    """

    name: str
    imbalance: float
    prediction: Prediction

    @property
    def line(self) -> str:
        """As text."""
        tpot, tok_s = self.prediction.tpot_ms.mean, self.prediction.output_tok_s
        return f"experts    {self.name}: busiest / mean {self.imbalance:.2f}, TPOT {tpot:.1f} ms, {tok_s:,.0f} tok/s"

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "imbalance": round(self.imbalance, 3),
            "tpot_ms": self.prediction.tpot_ms.mean,
            "output_tok_s": self.prediction.output_tok_s,
        }


def placements(text: str, case: LoadCase, parameters: PlanParameters) -> list[ExpertLoad]:
    """The case with experts in order, as planned from counts, and with a copied expert a rank.

    Args:
        text: a file of counts, as `build --expert-map` takes it.

    Raises:
        SpecError: the file has no counts, or is of another model; or no experts are spread over ranks.
    """
    system, read = case.decode, expert_map.read(text)
    if not (system.layout.spread and system.layout.ranks > 1):
        raise SpecError(
            f"--expert-map {text}: experts of {system.layout} are not spread over ranks; legal is a deployment that spreads them"
        )
    if not read.counts:
        raise SpecError(f"--expert-map {text} places experts and does not count them; legal is {expert_map.COUNT}")
    model, ranks = find(system.shape.name).model, system.layout.ranks
    counts, logical = expert_map.rows_of(read, model), system.shape.experts
    share = -(-logical // ranks)
    layers = {
        "in order": [by_default(share * ranks, logical) for _ in counts],
        "planned": expert_map.fitted(read, model, ranks).layers,
        f"planned, {COPIES * ranks} copies": expert_map.fitted(read, model, ranks, physical=(share + COPIES) * ranks).layers,
    }
    found = {name: imbalance(rows, counts, ranks) for name, rows in layers.items()}
    return [ExpertLoad(name, factor, predict(case, replace(parameters, imbalance=factor))) for name, factor in found.items()]
