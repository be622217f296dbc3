"""Measures throughput beside transformers, on the same checkpoint and prompts."""

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
from ...models.draft_source import open_both, recorded
from ...models.family_file import FamilyFile
from ..bench.report import Column, Table, Value
from ..bench.stats import Clock, interleave, ratio, spread
from ..bench.streams import Load, Run, TimedExecutor, through_engine
from ..progress import Progress

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
"""Greedily continues prompts of equal length, each by this many tokens."""


@dataclass(frozen=True)
class Served:
    """One load, as one side served it."""

    tokens_per_s: float
    token_ids: tuple[tuple[int, ...], ...]


def installed() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def checkpoint_dir(manifest: Manifest) -> Path:
    """The checkpoint directory that an artifact was built from.

    Raises:
        ModelError: it is missing or has changed.
    """
    for name in (*manifest.build_arguments[:1], str(manifest.model["name"])):
        try:
            directory = registry.find(name, FamilyFile.recorded(manifest.model)).checkpoint_dir
        except ModelError:
            continue
        if directory is None:
            continue
        digest = safetensors_files.digest(open_both(directory, recorded(manifest.model)))
        if digest != manifest.source_digest:
            raise ModelError(f"{directory} has digest {digest}; the artifact was built from {manifest.source_digest}; build it again")
        return directory
    named = " or ".join(manifest.build_arguments[:1]) or "no path"
    raise ModelError(f"the artifact was built from {manifest.model['name']!r} at {named}, and no checkpoint is there to compare with")


def _library() -> Any:
    """transformers without its NPU support, because its import of torch_npu fails on a machine without CANN."""
    library: Any = importlib.import_module("transformers")
    probes: Any = importlib.import_module("transformers.utils.import_utils")
    available = probes._is_package_available
    probes._is_package_available = lambda name, *rest, **named: (False, "N/A") if name == "torch_npu" else available(name, *rest, **named)
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
    # With an end-of-text id, the minimum length would forbid that token; without one it is an ordinary token on both sides.
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
    """Serves one load as one batch."""
    prompts = load.prompts(vocab)
    began = clock()
    token_ids = tuple(generate(prompts, load.tokens))
    seconds = clock() - began
    return Served(sum(map(len, token_ids)) / seconds, token_ids)


def serve_ours(run: Callable[[Load], Run], load: Load) -> Served:
    """Serves one load through the engine."""
    result = run(load)
    return Served(result.tokens_per_s, result.token_ids)


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int | None]:
    """The number of equal streams, and the smallest position (from 0) at which the others differ; None if all are equal."""
    positions = []
    for a, b in zip(ours, theirs, strict=True):
        if tuple(a) != tuple(b):
            positions.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))))
    return len(ours) - len(positions), min(positions, default=None)


def row(load: Load, ours: Sequence[Served], theirs: Sequence[Served]) -> dict[str, Value]:
    """The table row of one load."""
    verdicts = [first_difference(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)]
    our_speeds, peer_speeds = [served.tokens_per_s for served in ours], [served.tokens_per_s for served in theirs]
    return {
        "streams": load.streams,
        "ours_tokens_per_s": spread(our_speeds),
        "peer_tokens_per_s": spread(peer_speeds),
        "ours_over_peer": ratio(our_speeds, peer_speeds),
        "equal": f"{min(equal for equal, _ in verdicts)} of {load.streams}",
        "first_difference": min((position for _, position in verdicts if position is not None), default=None),
    }


def said(rows: Sequence[dict[str, Value]], dtype: str) -> str:
    """A sentence that says whether the greedy tokens were equal."""
    if all(row["first_difference"] is None for row in rows):
        return "greedy tokens are identical, on all streams and in all rounds"
    why = "; bfloat16 rounds too coarsely for equal argmaxes, compare tokens in float32" if dtype == "bf16" else ""
    return f"GREEDY TOKENS DIFFER: first difference is the position (from 0) of the first generated token that does{why}"


def peer(artifact: Artifact, loads: Sequence[Load], rounds: int, progress: Progress) -> Table:
    """Serves each load on both sides alternately.

    Raises:
        SpecError: transformers is not installed, or a load does not fit the context.
        ModelError: the checkpoint is missing or has changed.
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
            results = interleave(sides, rounds)
            rows.append(row(load, results["ours"], results["peer"]))
            bar.step(f"{load.streams} streams")
    notes = (
        said(rows, manifest.dtype),
        f"{loads[0].prompt_tokens} prompt tokens and {loads[0].tokens} generated, each stream; {manifest.dtype}, greedy, end of text "
        f"ignored; tok/s over the whole time, prefill included; medians (smallest..largest) of {rounds} rounds, both sides in turns",
        f"transformers {importlib.metadata.version('transformers')} generate on the same checkpoint: one batch without padding, "
        f"its default attention, {torch.get_num_threads()} threads for both sides; ours arrives as single requests",
    )
    return Table("peer", "Throughput beside transformers", COLUMNS, tuple(rows), notes)
