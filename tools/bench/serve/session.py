"""One run of `npucompile bench serve`: whom it asks, what it sends, and what its report says of itself."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....graphs.errors import ModelError, NpucompileError, SpecError
from ....graphs.paths import file_named
from ....lowering.artifact.artifact import Artifact
from ....models import registry
from ...cli import Home
from ...locate import artifact_path
from ...progress import Progress
from . import workload
from .arrivals import arrival_times
from .drive import drive
from .outcome import StreamOutcome
from .websocket import SocketTarget, Websocket
from .workload import Vocabulary, WorkloadPrompt

DATASETS = ("random", "prompts")
TOKENIZER = "tokenizer.json"
WARMUP_TOKENS = 32
"""Most tokens that a warm-up request generates."""


@dataclass(frozen=True)
class MadeLoad:
    """A load that has been made.

    Attributes:
        arrivals: seconds since its start at which each request is due.
    """

    prompts: tuple[WorkloadPrompt, ...]
    arrivals: tuple[float, ...]


@dataclass(frozen=True)
class SessionOptions:
    """The command's options, by the names of its parameters."""

    backend: str
    base_url: str | None
    host: str
    port: int
    api_key: str | None
    model: str | None
    tokenizer: str | None
    dataset: str
    dataset_path: Path | None
    num_prompts: int | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    warmup_requests: int
    seed: int
    ignore_eos: bool
    extra_body: str
    goodput: str | None
    json_to: str | None

    @property
    def url(self) -> str:
        """Of the server, without a slash or /v1 at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = self.base_url or f"http://{host}:{self.port}"
        if not url.startswith(("http://", "https://")):
            raise SpecError(f"--base-url is {url!r}; legal is http://HOST:PORT or https://HOST:PORT")
        return url.rstrip("/").removesuffix("/v1")


def find_target(home: Home, options: SessionOptions, key: str | None) -> tuple[SocketTarget, Vocabulary, int | None]:
    """The server with its model's name, the tokenizer that prompts are made with, and the model's context if the server tells it.

    Raises:
        NpucompileError: the server does not answer or lists no model, or there is no tokenizer.
    """
    try:
        extra = json.loads(options.extra_body)
    except ValueError as error:
        raise SpecError(f"--extra-body is not JSON: {error}; legal is an object") from None
    if not isinstance(extra, dict):
        raise SpecError(f"--extra-body is {options.extra_body!r}; legal is a JSON object")
    target = SocketTarget(options.url, options.model or "", options.ignore_eos, key, extra)
    model, max_model_len = (options.model, None) if options.model else served_model(target)
    vocabulary = Vocabulary.load(tokenizer_file(home, options.tokenizer, model))
    return replace(target, model=model), vocabulary, max_model_len


def served_model(target: SocketTarget) -> tuple[str, int | None]:
    """The first model that the server lists, and its context in tokens where it tells it (as vLLM, SGLang and we do).

    Raises:
        NpucompileError: it does not answer, or lists none.
    """
    url = f"{target.base_url}/v1/models"
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, headers=target.headers), timeout=30) as response:
            first = json.load(response)["data"][0]
        return str(first["id"]), first.get("max_model_len")
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        hint = "`npucompile serve` starts a server" if isinstance(getattr(error, "reason", None), OSError) else "--model names the model"
        raise NpucompileError(f"{url} lists no model: {error!r}; {hint}") from None


def tokenizer_file(home: Home, name: str | None, model: str) -> Path:
    """The tokenizer.json that an option names, or of a model of the served name on this machine.

    Raises:
        SpecError: there is none.
    """
    wanted = name or model
    for file in (Path(wanted), Path(wanted) / TOKENIZER):
        if file_named(file):
            return file
    try:
        artifact = Artifact.open(artifact_path(home.artifacts, wanted))
        if artifact.manifest.tokenizer:
            return artifact.path / artifact.manifest.tokenizer
    except NpucompileError:
        pass
    try:
        if found := registry.find(wanted).tokenizer:
            return found
    except ModelError:
        pass
    given = "--tokenizer is" if name else "the served model is"
    raise SpecError(f"{given} {wanted!r}, and nothing of that name here has a tokenizer; legal is --tokenizer with a {TOKENIZER}, a "
                    "directory with one, an artifact or a model")  # fmt: skip


def make_load(options: SessionOptions, vocabulary: Vocabulary) -> MadeLoad:
    """The requests and their times.

    Raises:
        SpecError: options that do not fit together, or a file that cannot be read.
    """
    if (options.dataset == "prompts") != (options.dataset_path is not None):
        needs = "needs" if options.dataset == "prompts" else "takes no"
        raise SpecError(f"--dataset {options.dataset} {needs} --dataset-path; legal is one with prompts only")
    prompts = make_prompts(options, vocabulary)
    return MadeLoad(prompts, arrival_times(len(prompts), options.request_rate, options.burstiness, options.seed))


def check_lengths(load: MadeLoad, max_model_len: int | None) -> None:
    """Refuses a load of which the server would refuse requests.

    Raises:
        SpecError: naming the longest request and the context.
    """
    longest = max(load.prompts, key=lambda prompt: len(prompt.token_ids) + prompt.output_tokens)
    prompt, output = len(longest.token_ids), longest.output_tokens
    if max_model_len is not None and prompt + output > max_model_len:
        raise SpecError(
            f"the longest request has {prompt} prompt tokens and {output} to generate; legal is together at most the {max_model_len} "
            "of the model's context"
        )


def make_prompts(options: SessionOptions, vocabulary: Vocabulary) -> tuple[WorkloadPrompt, ...]:
    """The prompts of a dataset."""
    if options.dataset == "random":
        sizes = (options.num_prompts or 100, options.random_input_len, options.random_output_len, options.random_range_ratio)
        return workload.drawn(vocabulary, *sizes, options.seed)
    assert options.dataset_path is not None
    return workload.read(vocabulary, options.dataset_path, options.num_prompts, options.random_output_len)


async def run(
    options: SessionOptions, target: SocketTarget, vocabulary: Vocabulary, load: MadeLoad, progress: Progress
) -> tuple[StreamOutcome, ...]:
    """Warms up, and sends the load.

    Raises:
        NpucompileError: a warm-up request failed.
    """
    async with Websocket(target) as sender:
        first = load.prompts[0]
        # Prompts of their own, so that no prefix of the load is in a cache before it begins.
        sizes = (options.warmup_requests, len(first.token_ids), min(first.output_tokens, WARMUP_TOKENS), 0.0)
        warmup = workload.drawn(vocabulary, *sizes, options.seed + 1)
        for outcome in await drive(sender, warmup, (0.0,) * len(warmup), max_concurrency=options.max_concurrency):
            if outcome.error is not None:
                raise NpucompileError(f"a warm-up request failed: {outcome.error}")
        with progress.bar("requests", len(load.prompts)) as bar:
            step = max(1, len(load.prompts) // 20)
            ended = 0

            def end(outcome: StreamOutcome) -> None:
                nonlocal ended
                ended += 1
                if ended % step == 0 or ended == len(load.prompts):
                    bar.step("", ended - bar.done)
                if outcome.error is not None:
                    progress.say(f"request {outcome.index} failed: {outcome.error}")

            return await drive(sender, load.prompts, load.arrivals, max_concurrency=options.max_concurrency, on_end=end)


def describe(options: SessionOptions, target: SocketTarget, load: MadeLoad) -> Mapping[str, Any]:
    """The settings as they stand in JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": options.backend,
        "model_id": target.model,
        "dataset": options.dataset,
        "num_prompts": len(load.prompts),
        "request_rate": options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "ignore_eos": options.ignore_eos,
        "goodput": options.goodput,
    }
