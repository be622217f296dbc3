"""Turns `npucompile build` into a plan and an artifact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ..graphs.errors import SpecError
from . import build as building
from . import plan as planning
from .cli import Home
from .notation import BUCKETS_HELP, format_buckets, parse_buckets
from .progress import Progress


def read_sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Reads a list of sizes in the notation of `--buckets`."""
    try:
        return parse_buckets(value)
    except SpecError as error:
        raise SpecError(f"{param.opts[0]}: {error}") from None


def sizes_option(name: str, default: tuple[int, ...], text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that takes such a list."""
    return click.option(name, callback=read_sizes, metavar="LIST", default=format_buckets(default), show_default=True, help=text)


def plan_lines(plan: planning.Plan) -> list[str]:
    """What will be built, as a person reads it."""
    sizes = f"{plan.params_bytes / 1e6:,.1f} MB of weights, {plan.state_bytes / 1e6:,.1f} MB of state"
    return [
        f"{plan.found.name}: {len(plan.buckets)} buckets for {plan.backend} ({', '.join(b.name for b in plan.buckets)})",
        f"  {sizes}; context {plan.limits.max_model_len}, {plan.limits.num_slots - 1} requests in flight",
        *(f"  {note}" for note in plan.notes),
    ]


@click.command("build", epilog=BUCKETS_HELP)
@click.argument("model")
@sizes_option("--buckets", planning.DEFAULT_BUCKETS, "Decode batch sizes, e.g. 2,4,...,64.")
@sizes_option("--prefill", planning.DEFAULT_PREFILL, "Prefill chunk sizes in tokens.")
@click.option("--max-model-len", type=click.IntRange(1), help="Most tokens of prompt and output together.  [default: at most 1024]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Most requests in flight.  [default: the largest bucket]")
@click.option("--dtype", type=click.Choice(["auto", *planning.DTYPES]), default="auto", show_default=True, help="Computing type.")
@click.option(
    "--backend", type=click.Choice(["inductor", "eager", "null"]), default="inductor", show_default=True,
    help="inductor compiles for this CPU; eager serves uncompiled; null reports cost and memory only.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Artifact directory.  [default: ~/.npucompile/artifacts/MODEL]")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option("--patience", type=click.IntRange(0, 19), default=0, show_default=True, help="Niceness of the compilers.")
@click.pass_obj
def command(
    home: Home,
    model: str,
    buckets: tuple[int, ...],
    prefill: tuple[int, ...],
    max_model_len: int | None,
    max_num_seqs: int | None,
    dtype: str,
    backend: str,
    out: Path | None,
    jobs: int,
    patience: int,
) -> None:
    """Build MODEL, a preset (see `npucompile models`) or a Hugging Face checkpoint directory, into an artifact.

    The artifact can serve as soon as its graphs are traced; executables are added as they are compiled and proved equal to
    the eager reference. Building again compiles only what changed.

    Example: npucompile build qwen3.5-tiny --buckets 2,4,...,16
    """
    progress = Progress()
    plan = planning.plan(planning.Options(model, buckets, prefill, max_model_len, max_num_seqs, dtype, backend))
    for line in plan_lines(plan):
        progress.say(line)
    out = out or planning.default_out(home.artifacts, plan.found)
    report = building.build(plan, out, home.cache, progress, jobs=jobs, patience=patience)
    progress.say(f"built in {report.seconds:.1f} s: {len(report.compiled)} compiled, {len(report.reused)} up to date")
    click.echo(report.path)
