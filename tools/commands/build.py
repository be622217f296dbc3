"""`npucompile build`: plans and builds a model, unless its artifact is up to date."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ..build import choices, stamp
from ..byte_sizes import parse_bytes
from ..cli import Home
from ..notation import BUCKETS_HELP, PREFILL_HELP, format_buckets, format_prefill, parse_buckets, parse_prefill
from ..progress import Progress
from .family_option import family_option
from .other_names import KnowsOtherNames

SHIPPED = "cache"
"""Folder of an artifact's compiled graphs, named apart from the module that it describes, which loads torch; a test compares both."""

ROOT = Path(__file__).resolve().parents[2]


def read_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...] | str | None:
    """Reads sizes in the notation of `--buckets`, or of `--prefill`; `auto` is read later, when model and deployment are known."""
    if value is None:
        return None
    if param.name == "buckets" and value.partition(":")[0] == "auto":
        return value
    try:
        return parse_prefill(value) if param.name == "prefill" else parse_buckets(value)
    except SpecError as error:
        raise SpecError(f"{param.opts[0]}: {error}") from None


def read_packages(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Reads names separated by commas."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def read_memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Reads a size of memory in bytes."""
    try:
        return None if value is None else parse_bytes(value)
    except SpecError as error:
        raise SpecError(f"{param.opts[0]}: {error}") from None


def sizes_option(name: str, default: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option whose value is such a list."""
    help_text = f"{text}  [default: {default}, or the deployment's]"
    return click.option(name, callback=read_sizes, metavar="LIST", help=help_text)


@click.command("build", cls=KnowsOtherNames, epilog=f"{BUCKETS_HELP}\n\n{PREFILL_HELP}")
@click.argument("model")
@sizes_option(
    "--buckets", format_buckets(choices.DEFAULT_BUCKETS),
    "Decode batch sizes (of one dp group), e.g. 2,4,...,64; auto: for the deployment's traffic, auto:FILE: `plan --buckets-out FILE`.",
)  # fmt: skip
@sizes_option(
    "--prefill", format_prefill(choices.DEFAULT_PREFILL),
    "Prefill sizes: tokens of one prompt, or PROMPTSxTOKENS (of one dp group), e.g. 2048,4x512.",
)  # fmt: skip
@click.option("--max-model-len", type=click.IntRange(1), help="Longest request in tokens, prompt and output.  [default: at most 1024]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Most requests in flight per dp group.  [default: the largest bucket]")
@click.option(
    "--max-total-tokens", type=click.IntRange(1),
    help="Most tokens cached at once per dp group.  [default: every request at full length, or the deployment's]",
)  # fmt: skip
@click.option(
    "--kv-cache-memory", callback=read_memory, metavar="SIZE",
    help="The same in memory of one rank: its KV pages take at most this, e.g. 2GiB.  [default: as --max-total-tokens]",
)  # fmt: skip
@click.option(
    "--checkpoint-slots", type=click.IntRange(0),
    help="Recurrent states kept for later prompts, per dp group, beside those of requests.  [default: --max-num-seqs, for NPUs 0]",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", *choices.DTYPES]), default="auto", show_default=True, help="Computing type.")
@click.option(
    "--backend", type=click.Choice(["inductor", "eager", "null", "ge", "aclgraph"]),
    help="inductor compiles for this CPU; eager serves uncompiled; ge and aclgraph lower for NPUs, to graphs that GE compiles or that are "
    "captured when they are loaded; null reports cost and memory only.  "
    "[default: the target's]",
)  # fmt: skip
@click.option("--target", type=click.Choice(choices.TARGETS), help="Machine to build for; it need not be present.  [default: cpu]")
@click.option("--mesh", help="Ranks as dp groups of tp ranks, e.g. dp=8,tp=2.  [default: one, or the deployment's]")
@click.option("--deployment", metavar="ID", help="Published deployment to take target, mesh and sizes from; see `npucompile deployments`.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), help="One side of a disaggregated deployment.  [default: both]")
@click.option("--quantization", type=click.Choice(choices.SCHEMES), help="Parameter quantization.  [default: none, or the deployment's]")
@click.option(
    "--speculative-tokens", "num_speculative_tokens", type=click.IntRange(0, 7),
    help="Tokens that each step drafts and the next step verifies.  [default: 3 with a draft head, or the deployment's]",
)  # fmt: skip
@click.option(
    "--draft-model", metavar="MODEL",
    help="Draft head of a second checkpoint: a directory, or a preset of sizes.  [default: the model's own, if it has one]",
)  # fmt: skip
@click.option(
    "--draft-vocab-size", type=click.IntRange(1),
    help="Draft from the first so many tokens, in a byte-pair vocabulary the frequent ones: a draft reads so many rows of the head, "
    "and no output changes.  [default: all tokens]",
)  # fmt: skip
@family_option
@click.option(
    "--max-logprobs", type=click.IntRange(0, 20),
    help="Most likely tokens whose log probabilities a request may ask for.  [default: 20, for NPUs 0]",
)  # fmt: skip
@click.option(
    "--structured-outputs", type=click.IntRange(0),
    help="Requests of one step, of one dp group, whose output may follow a grammar; the others wait a step.  [default: 8]",
)  # fmt: skip
@click.option(
    "--logit-adjustments", type=click.IntRange(0),
    help="Biases and penalties of one step, of one dp group; a request may have one of each, and the others wait a step.  "
    "[default: 8, for NPUs 0]",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(choices.WEIGHTS),
    help="For NPUs: stored copies the weights into the artifact, bound reads the checkpoint when serving; auto copies up to 8 GiB.  "
    "[default: auto]",
)  # fmt: skip
@click.option(
    "--kv-cache-dtype", type=click.Choice(choices.KV_CACHE_DTYPES), default="auto", show_default=True,
    help="Type of cached keys and values: auto is what the checkpoint has scales for, else the computing type; int8 halves pages.",
)  # fmt: skip
@click.option("--cann", type=click.Choice(choices.CANN_RELEASES), help="For NPUs: release of CANN to lower for.  [default: the target's]")
@click.option(
    "--operator-packages", callback=read_packages, metavar="LIST", default="",
    help=f"For NPUs: packages with operators of their own that are installed where it runs, of {', '.join(choices.OPERATOR_PACKAGES)}.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Artifact directory.  [default: ~/.npucompile/artifacts/MODEL]")
@click.option(
    "--precompile", type=click.Choice(["auto", "none", "npu", "emulated"]), default="auto", show_default=True,
    help="Also compile the graphs on devices of this machine, so that no start does; auto where it has NPUs.",
)  # fmt: skip
@click.option("--decided-by", hidden=True, help="Who decided the settings, where a build is repeated by the arguments of its manifest.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option("--nice", "--patience", "nice", type=click.IntRange(0, 19), default=0, show_default=True, help="Niceness of the compilers.")
@click.pass_obj
def command(home: Home, /, model: str, out: Path | None, precompile: str, jobs: int, nice: int, **options: Any) -> None:
    """Build MODEL, a preset (see `npucompile models`) or a Hugging Face checkpoint directory, into an artifact.

    For this machine, the artifact can serve as soon as its graphs are traced; executables are added as they are compiled and
    verified against the eager reference. For NPUs, every bucket becomes one GE graph for all ranks, which is checked without a
    device. A repeated build compiles only what changed.

    \b
    Examples: npucompile build qwen3.5-tiny --buckets 2,4,...,16
              npucompile build qwen3.5-397b --buckets 2,4,...,64
              npucompile build qwen3.5-397b --target ascend-a3 --mesh dp=4,tp=4 --quantization w8a8
    """
    if isinstance(options["buckets"], str):
        # Imported late: choosing buckets simulates, which loads torch.
        auto = importlib.import_module("..plan.auto", __package__)
        text = options["buckets"]
        options["buckets"] = auto.chosen(text, model, options["deployment"])
        Progress().say(auto.said(options["buckets"], text))
    path = out or home.artifacts / "-".join(filter(None, (Path(model).name, options["phase"])))
    named = [Path(name) for name in (model, options["draft_model"]) if name]
    own = [Path(options["family"])] if options["family"] else []
    fingerprint = stamp.fingerprint({**options, "model": model, "out": str(path), "precompile": precompile}, ROOT, named, own)
    if stamp.matches(path, fingerprint):
        Progress().say(f"{path} is up to date: the same options, sources, checkpoint and toolchain, and its files as they were left")
        click.echo(path)
        return
    # Imported late, so that a build that is up to date does not load torch.
    build_all = importlib.import_module("..build.build_all", __package__).build_all
    for path in build_all(model, options, out, home.artifacts, home.cache, jobs, nice):
        importlib.import_module("..serve.precompile", __package__).precompile(home, path, precompile, Progress())
        # The device's compiler may touch the files it keeps whenever it reads them.
        files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        stamp.write(path, fingerprint, [file.as_posix() for file in files if file.parts[0] != SHIPPED])
        click.echo(path)
