"""Measures step times of an artifact's executables, eager and compiled, against a floor set by memory bandwidth."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...graphs.errors import SpecError
from ...graphs.steps.decode import DECODE
from ...graphs.steps.kind import StepKind
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.request_slot import start
from ...graphs.steps.table import kind_of
from ...graphs.types import Aval
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ...lowering.backend import open_executable
from ...lowering.backends.inductor.huge_pages import settle
from ...lowering.executable import Executable, check_operands
from ...runtime.steps.pack import pack
from ...runtime.steps.rows import DecodeRow, PrefillRow
from ..agreement.executables import load_params
from ..progress import Progress
from .machine import MEMORY_BUFFER_BYTES, ReadLoop, cache_bytes, reader
from .report import Column, ReportTable, Value
from .stats import Clock, interleave, ratio, seconds_per_call, spread

STEPS = 5
"""Consecutive steps whose median is one sample, after an uncounted one; serving repeats a bucket in the same way."""

SEED = 11

DECODE_COLUMNS = (
    Column("bucket", "bucket"),
    Column("context_tokens", "context", 0),
    Column("eager_ms", "eager ms", 3),
    Column("compiled_ms", "compiled ms", 3),
    Column("speedup", "eager / compiled"),
    Column("read_mb", "MB read"),
    Column("read_gb_per_s", "GB/s", 1),
    Column("read_from", "from"),
    Column("floor_ms", "floor ms", 3),
    Column("over_floor", "time / floor", 1),
)
BANDWIDTH_COLUMNS = (
    Column("place", "read from"),
    Column("buffer_mb", "buffer MB", 1),
    Column("gb_per_s", "GB/s", 1),
)
PREFILL_COLUMNS = (
    Column("bucket", "bucket"),
    Column("eager_tokens_per_s", "eager tok/s", 0),
    Column("compiled_tokens_per_s", "compiled tok/s", 0),
    Column("speedup", "eager / compiled"),
    Column("compiled_ms", "compiled ms", 3),
)


@dataclass(frozen=True)
class StepCase:
    """One bucket at one context length, ready to run.

    Attributes:
        rows: live rows; fewer than the batch if the artifact has too few slots or pages.
        executables: "eager", and "compiled" if there is one; both use the same operands.
        read_bytes: bytes a step must read.
        request_slots: the pool of request slots among the operands, and its content before every step.
    """

    entry: GraphEntry
    context: int
    rows: int
    executables: Mapping[str, Executable]
    operands: Sequence[torch.Tensor]
    read_bytes: int
    request_slots: tuple[torch.Tensor, torch.Tensor] | None = None

    def calls(self) -> dict[str, Callable[[], None]]:
        """The step by each executable."""
        return {name: partial(self.again, executable) for name, executable in self.executables.items()}

    def again(self, executable: Executable) -> None:
        """Repeats the step from the same request slots, which every step overwrites."""
        if self.request_slots is not None:
            self.request_slots[0].copy_(self.request_slots[1])
        executable(self.operands)


def prepared(
    artifact: Artifact, params: Sequence[torch.Tensor], entry: GraphEntry, contexts: Sequence[int], state: Sequence[torch.Tensor]
) -> list[StepCase]:
    """The cases of a bucket at several contexts, which share its executables and the pools of `state` but for their request slots.

    Raises:
        ArtifactError: a file differs from the manifest.
    """
    manifest = artifact.manifest
    executables = {"eager": open_executable(artifact.path / entry.reference, "eager")}
    if entry.compiled:
        executables["compiled"] = open_executable(artifact.path / entry.compiled.file, entry.compiled.backend)
    at = len(params) + [leaf.path for leaf in manifest.state].index("request_slots")
    cases = []
    for context in contexts:
        operands, rows = step_operands(manifest, params, entry, context, state)
        check_operands(operands, manifest.signature(entry))
        slots = (operands[at], operands[at].clone())
        cases.append(StepCase(entry, context, rows, executables, operands, needed_bytes(manifest, entry, context), slots))
    return cases


def random_state(manifest: Manifest) -> list[torch.Tensor]:
    """Pools with random content. Untouched ones of zeros would all map to one physical page, which stays in the cache."""
    generator = torch.Generator().manual_seed(SEED)
    return [_filled(leaf.aval, generator) for leaf in manifest.state]


def step_operands(
    manifest: Manifest, params: Sequence[torch.Tensor], entry: GraphEntry, context: int, state: Sequence[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], int]:
    """Flat operands of a full greedy step of random tokens, and the number of its live rows.

    Args:
        state: pools that other steps may share; request slots are the step's own. None makes random ones.
    """
    limits, bucket = manifest.limits, entry.bucket
    draw = random.Random(SEED)
    vocab = int(manifest.model["vocab_size"])
    # A drafting step writes past its own tokens.
    pages = -(-min(limits.max_model_len, context + bucket.q_len + limits.drafts) // limits.page_size)
    live = min(bucket.batch, limits.num_request_slots - 1, (limits.num_pages - 1) // pages)
    owned = [[1 + i * pages + page for page in range(pages)] for i in range(live)]
    slots = [[1 + i * limits.slots_per_request + j for j in range(limits.slots_per_request)] for i in range(live)]
    tokens = [[draw.randrange(vocab) for _ in range(bucket.q_len)] for _ in range(live)]
    rows: list[DecodeRow] | list[PrefillRow]
    if kind_of(bucket).decodes:
        rows = [DecodeRow(1 + i, context, owned[i], slots[i], bucket.q_len - 1) for i in range(live)]
    else:
        rows = [PrefillRow(tokens[i], context, owned[i], slots[i][0], 1 + i) for i in range(live)]
    pools = [*(random_state(manifest) if state is None else state)]
    at = [leaf.path for leaf in manifest.state].index("request_slots")
    request_slots = pools[at] = pools[at].clone()
    if kind_of(bucket).decodes:
        for i in range(live):
            request_slots[1 + i] = start(context, tokens[i], limits)
    with_logprobs = any(leaf.path == "logprobs" for leaf in entry.inputs)
    inputs = pack(bucket, rows, limits, max_logprobs=int(with_logprobs))
    return [*params, *pools, *(torch.from_numpy(inputs[leaf.path]) for leaf in entry.inputs)], live


def _filled(aval: Aval, generator: torch.Generator) -> torch.Tensor:
    if not aval.dtype.is_floating_point:
        return torch.zeros(aval.shape, dtype=aval.dtype)
    return (0.1 * torch.randn(aval.shape, generator=generator)).to(aval.dtype)


def needed_bytes(manifest: Manifest, entry: GraphEntry, context: int) -> int:
    """Bytes a step must read: the weights it uses, state, and keys and values of the cached tokens.

    The cost of the graph assumes a full page table in every row; the part beyond this context is subtracted.
    """
    limits, bucket = manifest.limits, entry.bucket
    # The draft head reads its pool once per draft.
    reads = {leaf.name: 1 if leaf.path.startswith("layers.") else limits.drafts for leaf in manifest.state}
    pools = sum(reads[leaf.name] * leaf.aval.nbytes for leaf in manifest.state if leaf.aval.axes[0] == "pages")
    per_token = pools // (limits.num_pages * limits.page_size)
    beyond = limits.max_model_len - min(limits.max_model_len, context + bucket.q_len)
    return int(entry.cost["read_bytes"]) - bucket.batch * beyond * per_token


def decode_contexts(manifest: Manifest) -> tuple[int, ...]:
    """A short context, and half of the longest one."""
    longest = manifest.limits.max_model_len
    return tuple(sorted({min(64, longest // 2), longest // 2}))


def decode(
    artifact: Artifact,
    repetitions: int,
    progress: Progress,
    *,
    clock: Clock = time.perf_counter,
    cache: int | None = None,
    memory_buffer_bytes: int = MEMORY_BUFFER_BYTES,
) -> list[ReportTable]:
    """Step times of all decode buckets, and the read bandwidths behind their floors.

    Args:
        cache: bytes of the last-level cache; None asks the system.
        memory_buffer_bytes: size of a buffer larger than any cache.
    """
    cache = cache_bytes() if cache is None else cache
    entries, params, state = _of_kind(artifact, DECODE), load_params(artifact), random_state(artifact.manifest)
    cases = [case for entry in entries for case in prepared(artifact, params, entry, decode_contexts(artifact.manifest), state)]
    weights_bytes = sum(leaf.aval.nbytes for leaf in artifact.manifest.params)
    memory = reader(memory_buffer_bytes, 0, clock, memory_buffer_bytes=memory_buffer_bytes)
    readers = {"memory": memory}
    if weights_bytes <= cache:
        readers["cache (a buffer as large as all weights)"] = reader(weights_bytes, cache, clock)
    beside = [reader(case.read_bytes, cache, clock) if case.read_bytes <= cache else memory for case in cases]
    warm(cases)
    *seconds, reads = in_turns(
        [
            *(case.calls() | {"read": own.read} for case, own in zip(cases, beside, strict=True)),
            {place: own.read for place, own in readers.items()},
        ],
        repetitions, clock, progress, "decode",
    )  # fmt: skip
    rows = [decode_row(*parts) for parts in zip(cases, beside, seconds, strict=True)]
    speeds = {place: [own.nbytes / s / 1e9 for s in reads[place]] for place, own in readers.items()}
    notes = (
        f"every row live; medians (smallest..largest) of {repetitions} repetitions, each the median of {STEPS} steps in a row; "
        "all buckets, eager and compiled, and what is read beside them take turns, a round each",
        "floor: bytes a step must read over the read bandwidth of the same repetition: of a buffer as large where that fits the "
        "last-level cache (from: cache), else of one that no cache holds (from: memory)",
        "time / floor: of the executable that serves the bucket, compiled where there is one",
        "MB read: what the graph's cost report counts (weights it touches, state, activations), with the keys and values of this context",
    )
    bandwidth: list[dict[str, Value]] = [
        {"place": place, "buffer_mb": buffer.nbytes / 1e6, "gb_per_s": spread(speeds[place])} for place, buffer in readers.items()
    ]
    bandwidth_notes = ("in the rounds of the table above, whose floors use what was read in the same round",)
    return [
        ReportTable("decode", "Decode step time", DECODE_COLUMNS, tuple(rows), notes),
        ReportTable("decode", "Read bandwidth", BANDWIDTH_COLUMNS, tuple(bandwidth), bandwidth_notes),
    ]


def decode_row(case: StepCase, beside: ReadLoop, seconds: Mapping[str, Sequence[float]]) -> dict[str, Value]:
    """The table row of one case; floor and ratios are taken within a round.

    Args:
        seconds: a sample for each round, by executable, and of the reader as "read".
    """
    per_byte = [read / beside.nbytes for read in seconds["read"]]
    floor = [case.read_bytes * s for s in per_byte]
    served = seconds.get("compiled", seconds["eager"])
    return {
        "bucket": case.entry.bucket.name + ("" if case.rows == case.entry.bucket.batch else f" ({case.rows} rows)"),
        "context_tokens": case.context,
        **_milliseconds(seconds),
        "read_mb": case.read_bytes / 1e6,
        "read_gb_per_s": spread(1 / s / 1e9 for s in per_byte),
        "read_from": beside.place,
        "floor_ms": spread(1e3 * s for s in floor),
        "over_floor": ratio(served, floor),
    }


def prefill(artifact: Artifact, repetitions: int, progress: Progress, clock: Clock = time.perf_counter) -> ReportTable:
    """Tokens per second of all prefill buckets, on the first chunk of a prompt."""
    params, state = load_params(artifact), random_state(artifact.manifest)
    cases = [case for entry in _of_kind(artifact, PREFILL) for case in prepared(artifact, params, entry, (0,), state)]
    warm(cases)
    rows = []
    for case, seconds in zip(cases, in_turns([case.calls() for case in cases], repetitions, clock, progress, "prefill"), strict=True):
        bucket = case.entry.bucket
        rates = {f"{name}_tokens_per_s": spread(bucket.tokens / s for s in samples) for name, samples in seconds.items()}
        rows.append({"bucket": bucket.name, **rates, **_milliseconds(seconds)})
    notes = (
        f"full chunks from position 0; medians (smallest..largest) of {repetitions} repetitions, all buckets, eager and compiled, in turns",
    )
    return ReportTable("prefill", "Prefill throughput", PREFILL_COLUMNS, tuple(rows), notes)


def in_turns(
    groups: Sequence[Mapping[str, Callable[[], object]]], repetitions: int, clock: Clock, progress: Progress, title: str
) -> list[dict[str, list[float]]]:
    """Times calls of all groups in turns, so that a slow minute of the machine is in a sample of each, and of one round.

    Returns:
        of each group, a sample for each repetition by the name of the call, in seconds.
    """
    timed = {
        (i, name): partial(seconds_per_call, call, clock, calls=STEPS) for i, calls in enumerate(groups) for name, call in calls.items()
    }
    with progress.bar(title, repetitions + 1) as bar:
        seconds = interleave(timed, repetitions, after=lambda i: bar.step(f"round {i}" if i else "uncounted round"))
    return [{name: seconds[i, name] for name in calls} for i, calls in enumerate(groups)]


def warm(cases: Sequence[StepCase]) -> None:
    """Packs the weights of compiled executables, and waits until that has no effect on others any more."""
    compiled = [case.calls()["compiled"] for case in cases if "compiled" in case.executables]
    for call in compiled:
        call()
    if compiled:
        settle()


def _milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, Value]:
    executables = [name for name in ("eager", "compiled") if name in seconds]
    cells: dict[str, Value] = {f"{name}_ms": spread(1e3 * s for s in seconds[name]) for name in executables}
    if "compiled" in seconds:
        cells["speedup"] = ratio(seconds["eager"], seconds["compiled"])
    return cells


def _of_kind(artifact: Artifact, kind: StepKind) -> list[GraphEntry]:
    entries = sorted((entry for entry in artifact.manifest.graphs if entry.bucket.kind == kind.name), key=lambda entry: entry.bucket)
    if not entries:
        raise SpecError(f"{artifact.path} has no {kind.name} bucket; it has {', '.join(e.bucket.name for e in artifact.manifest.graphs)}")
    return entries
