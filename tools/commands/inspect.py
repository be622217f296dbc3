"""`npucompile inspect`: shows an artifact as tables, graph texts or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...runtime.kv_transfer.layout import LayoutError
from ..cli import Home
from ..inspection import cost, flame, legality, pair, summary, views
from ..locate import artifact_path
from ..serve.options import DECODE, PREFILL
from ..serve.pairing import Pairing


@click.command("inspect")
@click.argument("artifact", required=False)
@click.option("--bucket", help="One bucket: its name, or the batch size of a decode bucket.")
@click.option(
    "--stage",
    type=click.Choice(summary.SHOWN),
    help="Print a bucket's graph at this stage; ge or aclgraph is the one an NPU runs.",
)
@click.option("--collectives", is_flag=True, help="Print the ordered collectives of each bucket and check them for deadlocks.")
@click.option("--memory", is_flag=True, help="Print the memory plan of one rank.")
@click.option("--environment", is_flag=True, help="Print the environment variables of the ranks: value and reason.")
@click.option("--census", is_flag=True, help="Print operator counts, costs and a roofline estimate.")
@click.option("--cost", "costs", is_flag=True, help="Print the estimated time of a step by layer, cause and operator.")
@click.option("--assumptions", is_flag=True, help="Print what is assumed of CANN's operators without a public source.")
@click.option(
    "--pair", "other", metavar="B", help="Print what a prefill server of ARTIFACT hands over to a decode server of B, or why not."
)
@click.option(
    "--context",
    type=int,
    metavar="N",
    help="Cached tokens of each request for --cost, or of the prompt for --pair.  [default: half of the longest]",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also draw --cost into this file: nested rectangles, and streams beside each other.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; without another option, everything but graphs.")
@click.pass_obj
def command(
    home: Home,
    artifact: str | None,
    bucket: str | None,
    stage: str | None,
    collectives: bool,
    memory: bool,
    environment: bool,
    census: bool,
    costs: bool,
    assumptions: bool,
    other: str | None,
    context: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show ARTIFACT: a directory or the name of a built model, by default the newest artifact.

    \b
    Examples: npucompile inspect qwen3.5-tiny --bucket 4 --stage partitioned
              npucompile inspect qwen3.5-397b --bucket 8 --collectives
              npucompile inspect qwen3.5-397b --bucket 32 --cost --html step.html
              npucompile inspect deepseek-r1-prefill --pair deepseek-r1-decode --context 3500
    """
    options = {"--stage": stage, "--collectives": collectives, "--memory": memory, "--environment": environment, "--census": census}
    chosen = [name for name, is_set in (options | {"--cost": costs, "--assumptions": assumptions, "--pair": other}).items() if is_set]
    if len(chosen) > 1:
        raise SpecError(
            f"{' and '.join(chosen)} are given together; legal is one of {', '.join((*options, '--cost', '--assumptions', '--pair'))}"
        )
    if html and not costs:
        raise SpecError("--html is given without --cost, which it is for")
    if context is not None and not (costs or other):
        raise SpecError("--context is given without --cost or --pair, which it is for")
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    if other is not None:
        sides = opened, Artifact.open(artifact_path(home.artifacts, other))
        for role, side in zip((PREFILL, DECODE), sides, strict=True):
            Pairing(role).check(side)
        view, refused = pair.pair(*sides, context)
        show([view], as_json, one=True)
        if refused:
            raise LayoutError(refused)
        return
    manifest = opened.manifest
    entries = [summary.find(manifest, bucket)] if bucket is not None else list(manifest.graphs)
    if stage and bucket is None:
        raise SpecError(f"--stage prints one graph; name it with --bucket, one of {', '.join(e.bucket.name for e in manifest.graphs)}")
    of_buckets: dict[str, Callable[[GraphEntry], views.InspectView]] = {
        "--stage": lambda entry: summary.stage(opened, entry, str(stage)),
        "--collectives": lambda entry: views.collectives(opened, entry),
        "--census": lambda entry: views.census(opened, entry),
        "--cost": lambda entry: cost.view(opened, entry, context),
    }
    of_all: dict[str, Callable[[], views.InspectView]] = {
        "--assumptions": lambda: legality.assumed(opened, entries),
        "--memory": lambda: views.memory(manifest),
        "--environment": lambda: views.environment(manifest),
    }
    if not chosen and as_json:
        click.echo(json.dumps(summary.as_dict(opened, entries, costs=bucket is not None), indent=1))
    elif not chosen:
        click.echo("\n".join([*summary.table(opened, entries), *(summary.signature(entries[0]) if bucket is not None else ())]))
    elif chosen[0] in of_all:
        show([of_all[chosen[0]]()], as_json, one=True)
    else:
        show([of_buckets[chosen[0]](entry) for entry in entries], as_json, one=bucket is not None)
    if html:
        pictures = {entry.bucket.name: cost.step_cost(opened, entry, context) for entry in entries}
        timelines = {entry.bucket.name: cost.step_timeline(opened, entry, context) for entry in entries}
        html.write_text(flame.page(f"Time of a step: {opened.path.name}", pictures, timelines), encoding="utf-8")


def show(shown: Sequence[views.InspectView], as_json: bool, *, one: bool) -> None:
    """Prints views one after the other; as JSON a list of them, or the only one."""
    if as_json:
        data = [view.data for view in shown]
        click.echo(json.dumps(data[0] if one else data))
    else:
        click.echo("\n\n".join("\n".join(view.lines) for view in shown))
