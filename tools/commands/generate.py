"""`npucompile generate`: continues a prompt without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime.request import Sampling
from ...server.text.logprobs import token_objects
from ...server.text.token_text import TokenText
from ...server.text.tokenizer import TextTokenizer
from ..bench import acceptance
from ..builder.precision import DTYPES
from ..builder.uncompiled import opened
from ..cli import Home
from ..progress import Progress
from ..ranks.environment import applied
from ..ranks.executors import settled
from ..ranks.launch import open_named_artifact, opened_ranks, run_rank
from ..ranks.offline import OfflineCompletion, complete
from ..ranks.rank_settings import RankSettings
from ..ranks.torchrun import launcher_config
from ..serve.artifact_tokenizer import tokenizer_of
from ..serve.checkpoint_texts import with_texts_of
from .device_options import device_options
from .family_option import family_option


@click.command("generate")
@click.argument("artifact_or_model")
@click.option("--prompt", help="Text to continue.")
@click.option("--token-ids", help="Token ids to continue, e.g. 1,2,3.")
@click.option(
    "--image", "images", multiple=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Picture that stands before the text, which is then a user's message; may be repeated.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the most likely tokens up to this total probability.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the most likely one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampling.")
@click.option("--ignore-eos", is_flag=True, help="Continue after the end-of-text token.")
@click.option("--speculative-tokens", type=click.IntRange(0), help="Drafts verified per step; 0 disables them.  [default: as built]")
@click.option("--draft-model", metavar="MODEL", help="Build the model anew, uncompiled, with the draft head of this checkpoint.")
@family_option
@click.option("--logprobs", type=click.IntRange(0), help="With --json: log probabilities, also of this many most likely tokens.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Build the model anew, uncompiled, in this type.")
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    home: Home,
    artifact_or_model: str,
    prompt: str | None,
    token_ids: str | None,
    images: tuple[Path, ...],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    ignore_eos: bool,
    speculative_tokens: int | None,
    draft_model: str | None,
    family: str | None,
    logprobs: int | None,
    dtype: str | None,
    device: str,
    checkpoint: Path | None,
    off: tuple[str, ...],
    as_json: bool,
) -> None:
    """Continue a prompt without a server.

    ARTIFACT_OR_MODEL is an artifact directory, the name of a built model, or a model (preset, checkpoint directory, ORG/NAME at a hub).
    A model that is not built is traced and run uncompiled.

    Example: npucompile generate qwen3.5-tiny --prompt "In the beginning" --max-tokens 32 --json
    """
    if (prompt is None) == (token_ids is None):
        raise SpecError("give exactly one of --prompt and --token-ids")
    if logprobs is not None and not as_json:
        raise SpecError("--logprobs is printed with --json only; legal is both, or neither")
    prompt_ids = parse_ids(token_ids) if token_ids is not None else ()
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    settings = RankSettings(device=device, checkpoint=checkpoint, cache=home.cache, off=frozenset(off))
    config = launcher_config(home.environment, settings)
    with ExitStack() as stack:
        if config:
            artifact = open_named_artifact(home, artifact_or_model, config.local_rank)
        else:
            artifact = stack.enter_context(opened(home, artifact_or_model, dtype, draft_model, family, bool(images)))
        progress = Progress(quiet=as_json)
        settings = settled(artifact, settings)
        home = applied(home, artifact, settings, progress, config.node.address if config else "")
        if config and config.rank:
            run_rank(artifact, config, settings)
            return
        artifact = with_texts_of(artifact, checkpoint)
        manifest, codec = artifact.manifest, tokenizer_of(artifact)
        if prompt is not None and codec is None:
            raise SpecError(f"{artifact_or_model} has no tokenizer, so no --prompt; legal is --token-ids")
        ids, pictures = codec.encode(prompt) if codec and prompt is not None else prompt_ids, None
        if images:
            # Here, as it loads the server.
            from ..serve.offline_pictures import prompt_of

            ids, places = prompt_of(artifact, codec, prompt_ids if prompt is None else prompt, images)
            pictures = [places]
        executor = stack.enter_context(opened_ranks(artifact, config, settings, home.environment, progress))()
        stop = frozenset() if ignore_eos else frozenset(manifest.model["eos_ids"])
        options = {"logprobs": logprobs, "speculative_tokens": speculative_tokens}
        (completion,) = complete(executor, [ids], sampling, max_tokens, stop, pictures=pictures, **options)
    if completion.reason == "length" and completion.completion_tokens < max_tokens:
        most = f"prompt and output fill the context of {manifest.limits.max_model_len} tokens"
        click.echo(f"cut at {completion.completion_tokens} of --max-tokens {max_tokens}: {most}", err=True)
    text = codec.decode(completion.token_ids) if codec else ""
    if as_json:
        objects = {"logprobs": logprobs_of(completion, codec)} if logprobs is not None else {}
        click.echo(json.dumps(as_dict(completion, text, artifact, executor.backends) | objects))
        return
    click.echo(text)
    click.echo(f"token ids: {','.join(map(str, completion.token_ids))}", err=True)


def as_dict(completion: OfflineCompletion, text: str, artifact: Artifact, backends: Mapping[str, str]) -> dict[str, Any]:
    """What `--json` prints; `backends` are the executor's."""
    manifest = artifact.manifest
    return {
        "text": text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
        "acceptance_length": completion.acceptance_length,
        "acceptance_rates": acceptance.rates([completion.record]),
        "model": manifest.model["name"],
        "dtype": manifest.dtype,
        "artifact": artifact.digest,
        "backends": dict(backends),
        "record": completion.record._asdict(),
    }


def logprobs_of(completion: OfflineCompletion, codec: TextTokenizer | None) -> list[dict[str, Any]]:
    """Log probabilities of the generated tokens, an object each as the server sends them; without a tokenizer their texts are empty."""
    no_text = TokenText("", b"")
    return token_objects(codec.token_text if codec else lambda _: no_text, completion.token_ids, completion.logprobs)


def parse_ids(text: str) -> tuple[int, ...]:
    """Reads a list like `1,2,3`.

    Raises:
        SpecError: on anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SpecError(f"--token-ids is {text!r}; legal is a comma-separated list of non-negative integers")
    return tuple(int(part) for part in parts)
