"""`npucompile quantize`: writes the quantised checkpoint of one in floats or FP8."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...models import registry
from ...models.family_file import FamilyFile
from ...models.quant.recipes import SCHEMES
from ..cli import Home
from ..hub import checkpoint_of
from ..progress import Progress
from ..quantize.driver import QuantizeSettings, quantize
from ..quantize.plot import check_plot, plot
from ..quantize.report import summary, table
from .family_option import family_option


@click.command("quantize")
@click.argument("checkpoint")
@click.option(
    "--scheme", type=click.Choice([name for name in SCHEMES if name != "none"]), required=True,
    help="Formats of the matrices. -all also takes what published recipes leave float: head, linear attention, draft layers.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New or empty directory to write.")
@click.option("--keep", multiple=True, metavar="PATTERN", help="Matrices that stay float, as in '*.layers.0.*'; may be repeated.")
@click.option(
    "--group", "--group-size", type=click.IntRange(0), help="Weights that share an int4 scale; 0: a channel's.  [default: the recipe's]"
)
@click.option("--calibrate", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text to find static scales with.")
@click.option(
    "--static", multiple=True, metavar="PATTERN", help="Matrices whose activations get one scale for all tokens; may be repeated."
)
@click.option("--float-draft", is_flag=True, help="Leave the draft head float where the recipe quantises it.")
@family_option
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw the errors over the layers into this .svg, .png or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print the error of every matrix as JSON.")
@click.pass_obj
def command(
    home: Home,
    checkpoint: str,
    scheme: str,
    out: Path,
    keep: tuple[str, ...],
    group: int | None,
    calibrate: Path | None,
    static: tuple[str, ...],
    float_draft: bool,
    family: str | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Quantise CHECKPOINT to int8 or int4: w8a8 and w4a8 in the layout of ModelSlim, w4a16 in that of compressed-tensors.

    CHECKPOINT is a bundled model, or a directory or a hub's ORG/NAME with floats or in FP8.

    Which matrices are quantised follows the recipe of the model's published checkpoints. What is written builds like any checkpoint,
    and serving stacks for NPUs read it. One matrix is in memory at a time; only --calibrate loads the whole model. The error of a
    matrix is the root mean square of what rounding changed, relative to that of its weights.

    Example: npucompile quantize qwen3.5-tiny --scheme w8a8 --out tiny-w8a8
    """
    if picture:
        check_plot(picture)
    progress = Progress()
    checkpoint = checkpoint_of(checkpoint, home.environment, progress)
    source = registry.find(checkpoint, FamilyFile.read(family) if family else None)
    errors = quantize(source, out, QuantizeSettings(scheme, keep, static, calibrate, group, float_draft), progress)
    if picture:
        plot(errors, f"{source.name} in {scheme}", picture)
    if as_json:
        click.echo(json.dumps({"out": str(out), "scheme": scheme, "matrices": [error.as_dict() for error in errors]}, indent=1))
        return
    for line in (*table(errors), "", *summary(errors), str(out)):
        click.echo(line)
