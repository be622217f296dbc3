"""`npucompile calibrate`: fits the parameters of the prediction again, and says how well rows are predicted that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...graphs.errors import SpecError
from ..lab.accuracy import Accuracy, accuracy, lines_of, refit
from ..lab.fit import Fit
from ..lab.timed import read_bringup
from ..plan.parameters import FILE, NAMES, entries, priors
from ..progress import Progress


@click.command("calibrate")
@click.option("--report", is_flag=True, help="Also leave out each published row, then each model, and print the errors.  (minutes)")
@click.option(
    "--measured", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, metavar="FILE",
    help="Also fit the timed decode buckets of this bringup.json, from NPUs; may be repeated.",
)  # fmt: skip
@click.option("--context", type=click.IntRange(1), default=131, show_default=True, help="Cached tokens of the steps of --measured.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the parameters there, as `plan --parameters` reads them."
)
@click.option("--json", "as_json", is_flag=True, help="Print parameters and errors as JSON.")
def command(report: bool, measured: tuple[Path, ...], context: int, out: Path | None, as_json: bool) -> None:
    """Fit the parameters of `npucompile plan` to the published measurements, and to what a bring-up timed.

    \b
    Examples: npucompile calibrate --report
              npucompile calibrate --measured bringup.json --out parameters.json
              npucompile calibrate --out parameters.json
    """
    if out is not None and not out.parent.is_dir():
        raise SpecError(f"--out {out}: {out.parent} is no directory; legal is a file in one that exists")
    timed = [step for path in measured for step in read_bringup(path, context)]
    progress = Progress()
    progress.say("fitting the published rows" + (f" and {len(timed)} timed steps" if timed else ""))
    whole = refit(timed)
    result = accuracy(whole, lambda name: progress.say(f"without {name}")) if report else None
    if out is not None:
        out.write_text(as_file(whole, result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(as_dict(whole, result), indent=1))
    else:
        click.echo("\n".join(lines_of(result) if result else parameter_lines(whole)))


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
            evidence += f", {low:.3g} to {high:.3g} leaving out one row"
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
