"""How well rows are predicted that a fit has not seen: an eighth of them left out at a time, then one model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..advisor.plan.decode import decode_parts
from ..advisor.plan.measurements import Measured, loads, measured
from ..advisor.plan.parameters import NAMES, PlanParameters, priors
from ..advisor.plan.predict import Prediction, predict, uncalibrated
from ..advisor.plan.published import case_of
from ..advisor.plan.system import LoadCase
from ..builder.deployments import deployment
from .fit import Fit, fit
from .timed import TimedStep

IDEAL = PlanParameters(1, 1, 1, 1, 1600 / 24, 1, 1e-9, 1e-9, 1e-9, 1, 1e-9, 1e-9, 1e-9, 1, 1, 1e-9, 1, 1, 1)
"""Everything at its nameplate speed, nothing fixed: the roofline."""


TIE = 0.01
FOLDS = 8


@dataclass(frozen=True)
class Line:
    """One row: relative errors of TPOT and tok/s (predicted over measured, less 1); NaN of what is not published.

    Attributes:
        seen: by the fit of all rows; `row_out`, `family_out`: by fits without its eighth of the rows, and without its model.
        unknown: as `row_out`, with tokens a step that are not its own.
        roofline: of TPOT.
        inside: whether the 80 % interval of `row_out` holds TPOT, or tok/s where that is not published.
    """

    name: str
    model: str
    seen: tuple[float, float]
    row_out: tuple[float, float]
    family_out: tuple[float, float]
    unknown: tuple[float, float]
    roofline: float
    inside: bool
    note: str


@dataclass(frozen=True)
class Accuracy:
    """All rows, the fit of all, and how far each parameter moves when a row is left out."""

    lines: Sequence[Line]
    whole: Fit
    ranges: Mapping[str, tuple[float, float]]
    pairs: tuple[int, int]


def summary_of(prediction: Prediction) -> dict[str, float]:
    """What is fitted of a prediction."""
    tpot_ms, tok_s = prediction.tpot_ms.mean, prediction.output_tok_s
    return {"tpot_ms": tpot_ms, "output_tok_s": tok_s, "ttft_ms": prediction.ttft_ms.mean, "floor_tpot_ms": tpot_ms, "floor_tok_s": tok_s}


def model_of(cases: Mapping[str, LoadCase], timed: Sequence[TimedStep] = ()) -> Callable[[str, PlanParameters], Mapping[str, float]]:
    """The function that `fit` wants, of rows and timed steps by name."""
    steps = {step.name: step for step in timed}

    def model(name: str, parameters: PlanParameters) -> Mapping[str, float]:
        if name in steps:
            return {"step_ms": steps[name].predicted_ms(parameters)}
        return summary_of(predict(cases[name], parameters))

    return model


def rows_of(timed: Sequence[TimedStep] = ()) -> dict[str, Mapping[str, float]]:
    """What is fitted: published rows, and timed steps."""
    published = {"tpot_ms": "tpot_ms", "output_tok_s": "output_tok_s", "ttft_ms": "ttft_ms"}
    floors = {"tpot_ms": "floor_tpot_ms", "output_tok_s": "floor_tok_s"}
    rows: dict[str, Mapping[str, float]] = {
        name: {as_: value for own, as_ in (floors if name in loads() else published).items() if (value := getattr(row, own)) is not None}
        for name, row in measured().items()
    }
    return rows | {step.name: {"step_ms": 1e3 * step.seconds} for step in timed}


def refit(timed: Sequence[TimedStep] = ()) -> Fit:
    """The fit of all published rows, and of steps that were timed on NPUs."""
    cases = {name: case_of(name) for name in measured()}
    return fit(model_of(cases, timed), rows_of(timed), priors(), priors())


def accuracy(whole: Fit, say: Callable[[str], None] = lambda _: None) -> Accuracy:
    """Leaves out each model, then each eighth of the rows; such fits begin at the priors, which have seen none of them.

    Args:
        whole: the fit of all rows.
        say: told what is being left out.
    """
    rows = measured()
    cases = {name: case_of(name) for name in rows}
    model = model_of(cases)
    families: dict[str, list[str]] = {}
    for name, case in cases.items():
        families.setdefault(case.decode.shape.name, []).append(name)

    def without(left_out: Sequence[str]) -> PlanParameters:
        say(", ".join(left_out))
        kept = {name: figures for name, figures in rows_of().items() if name not in left_out}
        return fit(model, kept, priors(), priors()).parameters

    of_family = {family: without(names) for family, names in families.items()}
    names, of_row = list(rows), dict[str, PlanParameters]()
    for fold in (names[i::FOLDS] for i in range(FOLDS)):
        of_row |= dict.fromkeys(fold, without(fold))
    lines = [_line(name, cases[name], whole.parameters, of_row[name], of_family[cases[name].decode.shape.name]) for name in rows]
    every = [*of_family.values(), *of_row.values()]
    values = {name: [getattr(parameters, name) for parameters in every] for name in NAMES}
    ranges = {name: (min(own), max(own)) for name, own in values.items()}
    return Accuracy(lines, whole, ranges, ordered_pairs(lines, rows))


def _line(name: str, case: LoadCase, whole: PlanParameters, own: PlanParameters, family: PlanParameters) -> Line:
    row, prediction = measured()[name], predict(case, own)
    figure, value = ("tpot_ms", row.tpot_ms) if row.tpot_ms is not None else ("output_tok_s", row.output_tok_s)
    low, high = prediction.interval[figure]
    return Line(
        name,
        case.decode.shape.name,
        _errors(predict(case, whole), row),
        _errors(prediction, row),
        _errors(predict(case, family), row),
        _errors(predict(case_of(name, known=set(measured()) - {name}), own), row),
        roofline_ms(case) / row.tpot_ms - 1 if row.tpot_ms else math.nan,
        value is not None and low <= value <= high,
        uncalibrated(case),
    )


def ordered_pairs(lines: Sequence[Line], rows: Mapping[str, Measured]) -> tuple[int, int]:
    """How many orders of TPOT and of tok/s are as measured, of pairs of rows with the same model and lengths, and how many there are.

    Both rows are predicted by the fit without their model. Figures within `TIE` of each other have no order.
    """
    right = total = 0
    for one, other in itertools.combinations(lines, 2):
        if one.name in loads() or other.name in loads():
            # Floors are a few per cent below what ran.
            continue
        a, b = deployment(one.name), deployment(other.name)
        if (a.model, a.input_len, a.output_len) != (b.model, b.input_len, b.output_len):
            continue
        for index, field in enumerate(("tpot_ms", "output_tok_s")):
            first, second = (getattr(rows[line.name], field) for line in (one, other))
            if abs(first / second - 1) < TIE:
                continue
            predicted = first * (1 + one.family_out[index]) - second * (1 + other.family_out[index])
            total += 1
            right += predicted * (first - second) > 0
    return right, total


def roofline_ms(case: LoadCase) -> float:
    """A token's time if a step took only what nameplate speeds allow, with as many requests as are in flight, in the middle of them."""
    work, layout = case.workload, case.decode.layout
    batch = min(case.serving.max_running, -(-work.concurrency // (layout.dp * layout.instances)))
    parts = decode_parts(case.decode, IDEAL, batch, work.mean_input + work.mean_output / 2)
    kept = (part for cause, part in parts.items() if cause != "host")
    return float(1e3 * sum(float(part) for part in kept) / case.accepted)


def _errors(prediction: Prediction, row: Measured) -> tuple[float, float]:
    tpot = prediction.tpot_ms.mean / row.tpot_ms - 1 if row.tpot_ms else math.nan
    return tpot, prediction.output_tok_s / row.output_tok_s - 1 if row.output_tok_s else math.nan


def lines_of(result: Accuracy) -> list[str]:
    """The report as text."""
    head = f"{'':44} {'seen':>12} {'row out':>14} {'family out':>14} {'accept unknown':>15} {'roofline':>9}"
    text = ["errors of TPOT and tok/s in %, predicted over measured", "", head]
    for line in result.lines:
        columns = (line.seen, line.row_out, line.family_out, line.unknown)
        cells = " ".join(f"{100 * a:+6.1f} {100 * b:+6.1f} " for a, b in columns)
        text.append(f"{line.name:44} {cells} {100 * line.roofline:+7.1f}  {line.note}".rstrip())
    floors = [line for line in result.lines if line.name in loads()]
    text += ["", _medians("median of published rows", [line for line in result.lines if line.name not in loads()])]
    if floors:
        text += [_medians("of floors of nightly tests", floors), _signed("their mean, with its sign", floors)]
    for model in dict.fromkeys(line.model for line in result.lines):
        text.append(_medians(model, [line for line in result.lines if line.model == model]))
    inside = sum(line.inside for line in result.lines)
    text += [
        "",
        f"80 % intervals hold {inside} of {len(result.lines)} rows that were left out",
        f"rows of one model and lengths: {result.pairs[0]} of {result.pairs[1]} orders of TPOT and tok/s are right, their model left out",
        "",
        f"{'parameter':18} {'prior':>9} {'fitted':>9} {'row out':>19} {'sd(ln)':>7}",
    ]
    for name in NAMES:
        low, high = result.ranges[name]
        value, prior = getattr(result.whole.parameters, name), getattr(priors(), name)
        text.append(f"{name:18} {prior:9.3f} {value:9.3f} {low:9.3f} {high:9.3f} {result.whole.deviations[name]:7.2f}")
    return text


def _medians(label: str, lines: Sequence[Line]) -> str:
    every = [[line.seen for line in lines], [line.row_out for line in lines], [line.family_out for line in lines]]
    every.append([line.unknown for line in lines])
    cells = " ".join(f"{_median(e[0] for e in c):6.1f} {_median(e[1] for e in c):6.1f} " for c in every)
    roofline = _median(line.roofline for line in lines)
    return f"{label:44} {cells} {roofline:7.1f}"


def _signed(label: str, lines: Sequence[Line]) -> str:
    columns = ([getattr(line, key)[1] for line in lines] for key in ("seen", "row_out", "family_out", "unknown"))
    return f"{label:44} " + " ".join(f"{'':6} {100 * float(np.nanmean(column)):+6.1f} " for column in columns)


def _median(errors: Iterable[float]) -> float:
    """Of the sizes of what is published, in %."""
    known = [abs(error) for error in errors if not math.isnan(error)]
    return 100 * float(np.median(known)) if known else math.nan
