"""Turns one checkpoint and the same prompts into tokens a second of this project and of transformers, in turns."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import ModelError, SpecError
from ...graphs.types import DTYPES
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import Manifest
from ...models import registry, safetensors_files
from ..progress import Progress
from .report import Column, Table, Value
from .stats import Clock, interleave, ratio, spread
from .streams import Load, Run, TimedExecutor, through_engine

COLUMNS = (
    Column("streams", "streams", 0),
    Column("ours_tokens_per_s", "npucompile tok/s", 1),
    Column("peer_tokens_per_s", "transformers tok/s", 1),
    Column("ours_over_peer", "ratio"),
    Column("equal", "equal streams"),
    Column("first_difference", "first difference", 0),
)

MISSING = "the peer is transformers, which is not installed; install the test extra (pip install -e '.[test]'), or leave peer out of --only"

Generate = Callable[[Sequence[Sequence[int]], int], list[tuple[int, ...]]]
"""Continues prompts of equal length by so many tokens each, greedily."""


@dataclass(frozen=True)
class Served:
    """One load as one side served it."""

    tokens_per_s: float
    token_ids: tuple[tuple[int, ...], ...]


def installed() -> bool:
    """Whether there is a peer to compare with."""
    return importlib.util.find_spec("transformers") is not None


def checkpoint_dir(manifest: Manifest) -> Path:
    """The directory an artifact's weights were read from, still with those weights.

    Raises:
        ModelError: there is none, or it has changed.
    """
    for name in (*manifest.build_arguments[:1], str(manifest.model["name"])):
        try:
            found = registry.find(name).checkpoint_dir
        except ModelError:
            continue
        if found is None:
            continue
        digest = safetensors_files.digest(safetensors_files.open_checkpoint(found))
        if digest != manifest.source_digest:
            raise ModelError(f"{found} has digest {digest}; the artifact was built from {manifest.source_digest}; build it again")
        return found
    named = " or ".join(manifest.build_arguments[:1]) or "no path"
    raise ModelError(f"the artifact was built from {manifest.model['name']!r} at {named}, and no checkpoint is there to compare with")


def _library() -> Any:
    """transformers, on the CPU alone: it would import torch_npu wherever that is installed, which fails where there is no CANN."""
    library: Any = importlib.import_module("transformers")
    probes: Any = importlib.import_module("transformers.utils.import_utils")
    found = probes._is_package_available
    probes._is_package_available = lambda name, *rest, **named: (False, "N/A") if name == "torch_npu" else found(name, *rest, **named)
    return library


def transformers_generate(directory: Path, dtype: torch.dtype) -> Generate:
    """transformers' own `generate` over a checkpoint, with its default settings.

    Raises:
        SpecError: transformers is not installed.
    """
    if not installed():
        raise SpecError(MISSING)
    library = _library()
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    # With an end-of-text id, a minimum length would forbid that token; without one, it is a token like any other on both sides.
    model.generation_config.eos_token_id = None

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
            )
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]

    return generate


def serve_peer(generate: Generate, load: Load, vocab: int, clock: Clock = time.perf_counter) -> Served:
    """One load as one batch."""
    prompts = load.prompts(vocab)
    began = clock()
    token_ids = tuple(generate(prompts, load.tokens))
    seconds = clock() - began
    return Served(sum(map(len, token_ids)) / seconds, token_ids)


def serve_ours(run: Callable[[Load], Run], load: Load) -> Served:
    """One load through the engine."""
    found = run(load)
    return Served(found.tokens_per_s, found.token_ids)


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int | None]:
    """Streams that are equal, and the smallest position (from 0) at which one of the others differs; None when all are equal."""
    places = []
    for a, b in zip(ours, theirs, strict=True):
        if tuple(a) != tuple(b):
            places.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))))
    return len(ours) - len(places), min(places, default=None)


def row(load: Load, ours: Sequence[Served], theirs: Sequence[Served]) -> dict[str, Value]:
    """All rounds of one load."""
    verdicts = [first_difference(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)]
    mine, peers = [one.tokens_per_s for one in ours], [one.tokens_per_s for one in theirs]
    return {
        "streams": load.streams,
        "ours_tokens_per_s": spread(mine),
        "peer_tokens_per_s": spread(peers),
        "ours_over_peer": ratio(mine, peers),
        "equal": f"{min(equal for equal, _ in verdicts)} of {load.streams}",
        "first_difference": min((place for _, place in verdicts if place is not None), default=None),
    }


def said(rows: Sequence[dict[str, Value]], dtype: str) -> str:
    """Whether the greedy tokens were the same, in a sentence."""
    if all(one["first_difference"] is None for one in rows):
        return "greedy tokens are identical, on all streams and in all rounds"
    why = "; bfloat16 rounds too coarsely for equal argmaxes, compare tokens in float32" if dtype == "bf16" else ""
    return f"GREEDY TOKENS DIFFER: first difference is the position (from 0) of the first generated token that does{why}"


def peer(artifact: Artifact, loads: Sequence[Load], rounds: int, progress: Progress) -> Table:
    """Both sides on each load, in turns.

    Raises:
        SpecError: transformers is not installed, or a load does not fit the context.
        ModelError: the checkpoint is gone or has changed.
    """
    manifest = artifact.manifest
    if not installed():
        raise SpecError(MISSING)
    for load in loads:
        load.check(manifest.limits.max_model_len)
    dtype = DTYPES[manifest.dtype]
    generate = transformers_generate(checkpoint_dir(manifest), dtype)
    executor = TimedExecutor(artifact)
    run = partial(through_engine, executor, executor.calls)
    rows = []
    with progress.bar("peer", len(loads)) as bar:
        for load in loads:
            sides = {"ours": partial(serve_ours, run, load), "peer": partial(serve_peer, generate, load, executor.vocab_size)}
            found = interleave(sides, rounds)
            rows.append(row(load, found["ours"], found["peer"]))
            bar.step(f"{load.streams} streams")
    notes = (
        said(rows, manifest.dtype),
        f"{loads[0].prompt_tokens} prompt tokens and {loads[0].tokens} generated, each stream; {manifest.dtype}, greedy, end of text "
        f"ignored; tok/s over the whole time, prefill included; medians (smallest..largest) of {rounds} rounds, both sides in turns",
        f"transformers {importlib.metadata.version('transformers')} generate on the same checkpoint: one batch without padding, "
        f"its default attention, {torch.get_num_threads()} threads for both sides; ours arrives as single requests",
    )
    return Table("peer", "Throughput beside transformers", COLUMNS, tuple(rows), notes)
