"""Turns `npucompile generate` into text and token ids, offline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..graphs.errors import ArtifactMissing, SpecError
from ..lowering.artifact import Artifact
from ..runtime.executor import Executor
from ..runtime.request import Sampling
from ..server.text import TextCodec
from . import build as building
from . import plan as planning
from .cli import Home
from .locate import artifact_path
from .offline import complete
from .progress import Progress


@click.command("generate")
@click.argument("artifact_or_model")
@click.option("--prompt", help="Text to continue.")
@click.option("--token-ids", help="Token ids to continue, e.g. 1,2,3.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the most likely tokens up to this probability.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the most likely one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random stream of the request.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end of the text.")
@click.option("--dtype", type=click.Choice(list(planning.DTYPES)), help="Build the model afresh, uncompiled, in this type.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    home: Home,
    artifact_or_model: str,
    prompt: str | None,
    token_ids: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    ignore_eos: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Continue a prompt without a server.

    ARTIFACT_OR_MODEL is an artifact directory, a built model's name, or a model (preset or checkpoint directory), which is
    then traced and run uncompiled.

    Example: npucompile generate qwen3.5-tiny --prompt "In the beginning" --max-tokens 32 --json
    """
    if (prompt is None) == (token_ids is None):
        raise SpecError("give exactly one of --prompt and --token-ids")
    artifact = open_or_build(home, artifact_or_model, dtype)
    manifest = artifact.manifest
    codec = TextCodec.load(artifact.path / manifest.tokenizer) if manifest.tokenizer else None
    if prompt is not None:
        if codec is None:
            raise SpecError(f"{artifact.path} has no tokenizer, so no --prompt; legal is --token-ids")
        ids = codec.encode(prompt)
    else:
        ids = parse_ids(token_ids or "")
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    stop = frozenset() if ignore_eos else frozenset(manifest.model["eos_ids"])
    executor = Executor(artifact)
    (done,) = complete(executor, [ids], sampling, max_tokens, stop)
    text = codec.decode(list(done.token_ids)) if codec else ""
    if not as_json:
        click.echo(text)
        click.echo(f"token ids: {','.join(map(str, done.token_ids))}", err=True)
        return
    usage = {"prompt_tokens": done.prompt_tokens, "completion_tokens": done.completion_tokens}
    usage["total_tokens"] = sum(usage.values())
    record = {name: getattr(done.record, name) for name in done.record.__dataclass_fields__}
    told = {
        "text": text, "token_ids": done.token_ids, "finish_reason": done.reason, "usage": usage,
        "acceptance_length": done.acceptance_length, "model": manifest.model["name"], "dtype": manifest.dtype,
        "artifact": artifact.digest, "backends": executor.backends, "record": record,
    }  # fmt: skip
    click.echo(json.dumps(told))


def parse_ids(text: str) -> list[int]:
    """Reads `1,2,3`.

    Raises:
        SpecError: on anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SpecError(f"--token-ids is {text!r}; legal is a comma-separated list of non-negative integers")
    return [int(part) for part in parts]


def open_or_build(home: Home, name: str, dtype: str | None) -> Artifact:
    """The artifact of that name, or else the model of that name as an uncompiled artifact in the cache."""
    if dtype is None:
        try:
            artifact = Artifact.open(artifact_path(home.artifacts, name))
        except ArtifactMissing:
            pass
        else:
            artifact.check_runnable()
            return artifact
    plan = planning.plan(planning.Options(name, buckets=(1,), dtype=dtype or "auto", backend="eager"))
    out: Path = home.cache / "eager" / f"{plan.found.name}-{planning.dtype_name(plan.dtype)}"
    building.build(plan, out, home.cache, Progress(quiet=True))
    return Artifact.open(out)
