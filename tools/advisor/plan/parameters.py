"""The fitted parameters of the prediction; each has its prior, value and evidence in `parameters.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ....graphs.errors import SpecError

FILE = Path(__file__).with_name("parameters.json")


@dataclass(frozen=True)
class PlanParameters:
    """What is fitted to measurements; units and meanings are in `parameters.json`."""

    memory: float
    matrix: float
    stream: float
    attention: float
    core_gb_s: float
    imbalance: float
    launch_us: float
    exchange_us: float
    collective_us: float
    link: float
    host_ms: float
    groups_ms: float
    draft_ms: float
    prefill_split: float
    prefill_spread: float
    prefill_layer_ms: float
    prefill_attention: float
    state_stream: float
    prefill_rule: float


NAMES = tuple(field.name for field in fields(PlanParameters))


@cache
def entries(path: Path = FILE) -> Mapping[str, Mapping[str, Any]]:
    """Prior, value, unit, meaning and evidence of each parameter, by name.

    Raises:
        SpecError: the file has other parameters, or a number that is not positive.
    """
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    if set(table) != set(NAMES):
        raise SpecError(f"{path} has {', '.join(sorted(table))}; legal are exactly {', '.join(NAMES)}")
    for name, entry in table.items():
        for key in ("prior", "value", "sigma"):
            number = entry.get(key)
            if not isinstance(number, int | float) or isinstance(number, bool) or not (number > 0 and math.isfinite(number)):
                raise SpecError(f"{path}: {key} of {name} is {number!r}; legal is a positive number")
    return table


def fitted(path: Path = FILE) -> PlanParameters:
    """The values of a file.

    Raises:
        SpecError: as `entries`.
    """
    return PlanParameters(**{name: float(entry["value"]) for name, entry in entries(path).items()})


def priors() -> PlanParameters:
    """The priors of the file."""
    return PlanParameters(**{name: float(entry["prior"]) for name, entry in entries(FILE).items()})


def sigmas() -> list[float]:
    """What each parameter's logarithm may differ from its prior's by, in the order of `NAMES`."""
    return [float(entries(FILE)[name]["sigma"]) for name in NAMES]


def as_logs(parameters: PlanParameters) -> list[float]:
    """Natural logarithms, in the order of `NAMES`."""
    return [math.log(value) for value in asdict(parameters).values()]


def of_logs(logs: list[float]) -> PlanParameters:
    """The inverse of `as_logs`."""
    return PlanParameters(*(math.exp(log) for log in logs))
