"""`npucompile deployments`: shows published deployments as a table, one in detail, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...graphs.errors import SpecError
from ..advice import adviser
from ..bench.report import as_data, as_markdown
from ..builder.deployments import deployment, deployments


def _refuse_built(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise SpecError(f"--built is gone; legal is `npucompile inspect {value}/ID --cost` and `npucompile deployments ID`")


@click.command("deployments")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--model", help="Only deployments of this model.")
@click.option(
    "--predict",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Print the estimated decode steps of the artifacts in DIR, each built with --deployment, as Markdown.",
)
@click.option("--accepted", type=click.FloatRange(1), help="Tokens a step for --predict.  [default: those of published drafts]")
@click.option("--built", hidden=True, expose_value=False, callback=_refuse_built, help="Gone: inspect shows an artifact.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(name: str | None, model: str | None, predict: Path | None, accepted: float | None, as_json: bool) -> None:
    """List published Ascend deployments, or show ID in detail.

    A deployment gives a build its target, mesh, quantization, buckets, drafts and context.

    \b
    Examples: npucompile deployments --model qwen3.5-397b
              npucompile deployments qwen35-397b-a3x8-in16k-out1k-50ms
              npucompile build qwen3.5-397b --deployment qwen35-397b-a3x8-in16k-out1k-50ms
              npucompile deployments --predict artifacts
    """
    if predict is not None:
        prediction = adviser("plan.prediction")  # Late: it loads torch.
        predicted = prediction.predictions(predict, accepted or prediction.ACCEPTED)
        click.echo(json.dumps(as_data(predicted), indent=1) if as_json else as_markdown(predicted), nl=as_json)
        return
    listing = adviser("plan.listing")
    rows = [deployment(name)] if name is not None else list(deployments().values())
    if model is not None:
        rows = listing.of_model(rows, model)
    if as_json:
        plain = [listing.as_dict(row) for row in rows]
        click.echo(json.dumps(plain if name is None else plain[0], indent=1))
    else:
        click.echo("\n".join(listing.table(rows) if name is None else listing.details(rows[0])))
