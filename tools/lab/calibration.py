"""Fits the parameters of `npucompile plan` again, and says how well rows are predicted that the fit has not seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..advisor.plan.parameters import FILE, NAMES, entries, priors
from ..progress import Progress
from .accuracy import Accuracy, accuracy, lines_of, refit
from .fit import Fit
from .timed import read_bringup


def calibrate(measured: Sequence[Path], context: int, report: bool, progress: Progress) -> tuple[Fit, Accuracy | None]:
    """The fit to the published rows and to what bring-ups timed, and with `report` its errors.

    Args:
        context: cached tokens of the timed steps.
    """
    timed = [step for path in measured for step in read_bringup(path, context)]
    progress.say("fitting the published rows" + (f" and {len(timed)} timed steps" if timed else ""))
    whole = refit(timed)
    return whole, accuracy(whole, lambda name: progress.say(f"without {name}")) if report else None


def as_lines(whole: Fit, result: Accuracy | None) -> list[str]:
    """The errors where they were asked for, else the parameters."""
    return list(lines_of(result)) if result else parameter_lines(whole)


def parameter_lines(whole: Fit) -> list[str]:
    """Each parameter beside its prior."""
    lines = [f"{'parameter':18} {'prior':>9} {'fitted':>9} {'sd(ln)':>7}  unit"]
    for name in NAMES:
        value, prior, unit = getattr(whole.parameters, name), getattr(priors(), name), entries()[name]["unit"]
        lines.append(f"{name:18} {prior:9.3f} {value:9.3f} {whole.deviations[name]:7.2f}  {unit}")
    return lines


def as_file(whole: Fit, result: Accuracy | None) -> str:
    """The text of a file of parameters: those of this one, with the fitted values and their evidence."""
    lines = []
    for name, entry in entries(FILE).items():
        evidence = f"fit to {len(whole.jacobian)} rows and steps, standard deviation of the logarithm {whole.deviations[name]:.2f}"
        if result is not None:
            low, high = result.ranges[name]
            evidence += f", {low:.3g} to {high:.3g} leaving out an eighth of the rows or a model"
        changed = {**entry, "value": float(f"{getattr(whole.parameters, name):.4g}"), "evidence": evidence}
        lines.append(f" {json.dumps(name)}: {json.dumps(changed)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def as_dict(whole: Fit, result: Accuracy | None) -> dict[str, object]:
    """Plain values."""
    parameters = {
        name: {"value": getattr(whole.parameters, name), "prior": getattr(priors(), name), "sd": whole.deviations[name]} for name in NAMES
    }
    if result is None:
        return {"parameters": parameters}
    rows = {
        line.name: {
            key: {"tpot": getattr(line, key)[0], "tok_s": getattr(line, key)[1]} for key in ("seen", "row_out", "family_out", "unknown")
        } | {"roofline": line.roofline, "inside": line.inside, "uncalibrated": line.note}
        for line in result.lines
    }  # fmt: skip
    return {"parameters": parameters, "rows": rows, "pairs": {"right": result.pairs[0], "all": result.pairs[1]}}
