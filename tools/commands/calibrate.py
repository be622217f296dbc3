"""`npucompile calibrate`: fits the parameters of the prediction again, and says how well rows are predicted that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...graphs.errors import SpecError
from ..laboratory import laboratory
from ..progress import Progress


@click.command("calibrate")
@click.option("--report", is_flag=True, help="Also leave out each model, then each eighth of the rows, and print the errors.  (20 minutes)")
@click.option(
    "--measured", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, metavar="FILE",
    help="Also fit the timed decode buckets of this bringup.json or .tar.xz, from NPUs; may be repeated.",
)  # fmt: skip
@click.option("--context", type=click.IntRange(1), default=131, show_default=True, help="Cached tokens of the steps of --measured.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the parameters there, as `plan --parameters` reads them."
)
@click.option(
    "--profile", "profiles", type=click.Path(path_type=Path, exists=True), multiple=True, metavar="PATH",
    help="Instead compare single operators with these op_summary tables of msprof, or directories or wheels of them.",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Instead read the bringup.tar.xz of a bring-up on NPUs: what it measured, CANN's rows beside ours, risks that held.",
)  # fmt: skip
@click.option(
    "--patch", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="With --archive, write what it changes there, for `git apply`: parameters of the cost model, outcomes in docs/on-hardware.md.",
)  # fmt: skip
@click.option("--chip", type=click.Choice(("A3", "910B1", "910B4")), default="A3", show_default=True, help="Of tables that name none.")
@click.option("--json", "as_json", is_flag=True, help="Print parameters and errors as JSON.")
def command(
    report: bool,
    measured: tuple[Path, ...],
    context: int,
    out: Path | None,
    profiles: tuple[Path, ...],
    archive: Path | None,
    patch: Path | None,
    chip: str,
    as_json: bool,
) -> None:
    """Fit the parameters of `npucompile plan` to the published measurements, and to what a bring-up timed.

    \b
    Examples: npucompile calibrate --report
              npucompile calibrate --measured bringup.json --out parameters.json
              npucompile calibrate --out parameters.json
              npucompile calibrate --profile PROF_000001/
              npucompile calibrate --archive bringup.tar.xz --patch hardware.patch
    """
    if patch is not None and archive is None:
        raise SpecError(f"--patch {patch} is of what a bring-up sent back; legal is --archive FILE with it")
    if archive is not None:
        _read_archive(archive, patch, as_json=as_json)
        return
    if profiles:
        times = laboratory("kernel_times", "calibrate")
        judged, left = times.judge(profiles, chip)
        click.echo(json.dumps(times.as_dict(judged, left), indent=1) if as_json else "\n".join(times.lines(judged, left)))
        return
    if out is not None and not out.parent.is_dir():
        raise SpecError(f"--out {out}: {out.parent} is no directory; legal is a file in one that exists")
    lab = laboratory("calibration", "calibrate")
    whole, result = lab.calibrate(measured, context, report, Progress())
    if out is not None:
        out.write_text(lab.as_file(whole, result), encoding="utf-8")
    click.echo(json.dumps(lab.as_dict(whole, result), indent=1) if as_json else "\n".join(lab.as_lines(whole, result)))


def _read_archive(archive: Path, patch: Path | None, *, as_json: bool) -> None:
    lab = laboratory("sent_back", "calibrate")
    sent = lab.read(archive)
    if patch is not None:
        patch.write_text(lab.patch(sent), encoding="utf-8")
    if as_json:
        measured = {name: {"value": value, "measured": what} for name, (value, what) in lab.measured_parameters(sent).items()}
        click.echo(json.dumps({"source": sent.source, "parameters": measured, "risks": lab.risks(sent)}, indent=1))
        return
    click.echo("\n".join(lab.lines(sent)))
