"""Turns `npucompile build` into a plan and an artifact."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ..build import choices, stamp
from ..cli import Home
from ..notation import BUCKETS_HELP, format_buckets, parse_buckets
from ..progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def read_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Reads a list of sizes in the notation of `--buckets`."""
    if value is None:
        return None
    try:
        return parse_buckets(value)
    except SpecError as error:
        raise SpecError(f"{param.opts[0]}: {error}") from None


def sizes_option(name: str, default: tuple[int, ...], text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that takes such a list."""
    said = f"{text}  [default: {format_buckets(default)}, or the deployment's]"
    return click.option(name, callback=read_sizes, metavar="LIST", help=said)


@click.command("build", epilog=BUCKETS_HELP)
@click.argument("model")
@sizes_option("--buckets", choices.DEFAULT_BUCKETS, "Decode batch sizes (of one dp group), e.g. 2,4,...,64.")
@sizes_option("--prefill", choices.DEFAULT_PREFILL, "Prefill chunk sizes in tokens.")
@click.option("--max-model-len", type=click.IntRange(1), help="Most tokens of prompt and output together.  [default: at most 1024]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Most requests in flight, per dp group.  [default: the largest bucket]")
@click.option("--dtype", type=click.Choice(["auto", *choices.DTYPES]), default="auto", show_default=True, help="Computing type.")
@click.option(
    "--backend", type=click.Choice(["inductor", "eager", "null", "ge"]),
    help="inductor compiles for this CPU; eager serves uncompiled; ge lowers for NPUs; null reports cost and memory only.  "
    "[default: the target's]",
)  # fmt: skip
@click.option("--target", type=click.Choice(choices.TARGETS), help="Machine to build for; none of it is needed here.  [default: cpu]")
@click.option("--mesh", help="Ranks: dp groups of tp ranks, as in dp=8,tp=2.  [default: one, or the deployment's]")
@click.option("--deployment", metavar="ID", help="A published deployment: target, mesh and sizes (`npucompile deployments` lists them).")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), help="One side of a deployment that splits them.  [default: both]")
@click.option("--quantization", type=click.Choice(choices.SCHEMES), help="How parameters are held.  [default: none, or the deployment's]")
@click.option(
    "--speculative-tokens", "num_speculative_tokens", type=click.IntRange(0, 7),
    help="Tokens that each step drafts and the next one verifies.  [default: 3 with a draft head, or the deployment's]",
)  # fmt: skip
@click.option(
    "--max-logprobs", type=click.IntRange(0, 20),
    help="Of how many most likely tokens a request may ask the log probabilities.  [default: 20, for NPUs 0]",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Artifact directory.  [default: ~/.npucompile/artifacts/MODEL]")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option("--nice", "--patience", "nice", type=click.IntRange(0, 19), default=0, show_default=True, help="Niceness of the compilers.")
@click.pass_obj
def command(home: Home, /, model: str, out: Path | None, jobs: int, nice: int, **asked: Any) -> None:
    """Build MODEL, a preset (see `npucompile models`) or a Hugging Face checkpoint directory, into an artifact.

    For this machine: the artifact can serve as soon as its graphs are traced; executables are added as they are compiled and
    proved equal to the eager reference. For NPUs: every bucket becomes a GE graph for all ranks, checked here, with no device.
    Building again compiles only what changed.

    \b
    Examples: npucompile build qwen3.5-tiny --buckets 2,4,...,16
              npucompile build qwen3.5-397b --buckets 2,4,...,64
              npucompile build qwen3.5-397b --target ascend-a3 --mesh dp=4,tp=4 --quantization w8a8
    """
    place = out or home.artifacts / "-".join(filter(None, (Path(model).name, asked["phase"])))
    known = stamp.fingerprint({**asked, "model": model, "out": str(place)}, ROOT, [Path(model)])
    if stamp.matches(place, known):
        Progress().say(f"{place} is up to date: the same options, sources, checkpoint and toolchain, and its files as they were left")
        click.echo(place)
        return
    # Not imported above: a build that finds nothing to do is done before torch would be loaded.
    build_all = importlib.import_module("..build.build_all", __package__).build_all
    for path in build_all(model, asked, out, home.artifacts, home.cache, jobs, nice):
        stamp.write(path, known, [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()])
        click.echo(path)
