"""Whole buckets, one after another and in alternation, on all ranks of a device against the interpreter of their graphs."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ....graphs.errors import NpucompileError
from ....graphs.steps.table import kind_of
from ....graphs.types import Bucket, Leaf, Mesh
from ....lowering.artifact.artifact import Artifact
from ....runtime.device_params import LoadParams
from ....runtime.executor import Executor, Outputs
from ...agreement.compare import Deviations
from ...agreement.pools import PoolPlaces
from ...agreement.tolerances import INTEGERS
from ...heap import available_bytes
from ...progress import Bar
from ..all_ranks import load_ranks, run_step
from .recording import ShippedBucket
from .results import BringupFailure, Judgement, Timing
from .steps import PlannedStep, StepPlanner

STEPS = 3
"""Steps of each bucket, one after another."""
ROUNDS = 8
"""How often all buckets take turns."""
MOST_ROWS = 4
"""Most requests of a step: each takes a prefill first, which the CPU computes for all ranks. Other rows are padding."""
IN_TURNS = "all buckets in turns"

ReadState = Callable[[], Mapping[str, torch.Tensor]]
"""The pools of rank 0 on the host, by name."""


class MeshOracle:
    """All ranks of an artifact on the CPU: their parameters, their pools, and the interpreter of every bucket.

    Args:
        load_params: of a rank.
    """

    def __init__(self, graphs: Sequence[ShippedBucket], mesh: Mesh, load_params: Callable[[int], LoadParams]) -> None:
        self._graphs = {graph.bucket: graph for graph in graphs}
        self._interpreters = {graph.bucket: graph.interpreter(mesh) for graph in graphs}
        self._mesh, signature = mesh, graphs[0].signature
        self._params = load_ranks(mesh, signature, load_params)
        self.leaves: tuple[Leaf, ...] = signature.state
        self.state = [[torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in self.leaves] for _ in range(mesh.size)]

    def step(self, step: PlannedStep) -> list[Outputs]:
        """Runs a step on all ranks; returns the outputs of the first rank of each dp group."""
        run, signature = self._interpreters[step.bucket], self._graphs[step.bucket].signature
        results = run_step(run, self._mesh, signature, self._params, self.state, step.tensors)
        first = {self._mesh.coordinates(rank)["dp"]: rank for rank in reversed(range(self._mesh.size))}
        return [{name: value.numpy() for name, value in results[first[group]].items()} for group in range(len(step.inputs))]


def oracle_bytes(artifact: Artifact) -> int:
    """Memory that `MeshOracle` takes."""
    manifest = artifact.manifest
    memory = manifest.graphs[0].memory
    return (memory["params_bytes"] + memory["state_bytes"]) * Mesh.parse(manifest.mesh).size


def free_bytes() -> int:
    """Memory of this machine that is available."""
    return available_bytes(Path("/proc/meminfo").read_text())


@dataclass
class Comparison:
    """Steps of a device beside those of the oracle.

    A row whose tokens differ leaves the comparison, since everything after them follows from them; too many such rows are a failure.

    Args:
        oracle: None compares nothing but whether outputs are legal.
    """

    vocab: int
    oracle: MeshOracle | None
    different: set[tuple[int, int]] = field(default_factory=set)
    compared: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, what: str, step: PlannedStep, actual: Sequence[Outputs]) -> None:
        """Compares the outputs of a step; the oracle runs it first."""
        expected = self.oracle.step(step) if self.oracle else None
        for group, outputs in enumerate(actual):
            for row, request in enumerate(step.rows):
                if (group, request.request_slot) in self.different:
                    continue
                self.compared += 1
                tokens = _taken(outputs, row)
                right = _taken(expected[group], row) if expected else tokens
                if tokens != right or not all(0 <= token < self.vocab for token in tokens):
                    self.different.add((group, request.request_slot))
                    self.messages.append(f"{what}: row {row} of group {group} has tokens {tokens}; the CPU has {right}")

    def forget(self, group_rows: Sequence[PoolPlaces]) -> None:
        """Takes rows back whose requests begin anew."""
        self.different -= {(group, request) for group, request in self.different if request in {row.request_slot for row in group_rows}}

    @property
    def too_many(self) -> bool:
        """Whether more rows took other tokens than nearly equal logits explain."""
        return len(self.messages) > INTEGERS * self.compared

    def state_errors(self, state: Mapping[str, torch.Tensor], rows: Sequence[PoolPlaces]) -> list[str]:
        """How the pools of rank 0 differ from the oracle's, in what these requests own."""
        if self.oracle is None:
            return []
        deviations, mine = Deviations(), [row for row in rows if (0, row.request_slot) not in self.different]
        for leaf, right in zip(self.oracle.leaves, self.oracle.state[0], strict=True):
            owned = [place for row in mine for place in row.of(leaf)]
            a, b = right[owned], state[leaf.name][owned]
            deviations.add(0, leaf.name, a, b, (a != 0) | (b != 0))
        return [f"{name}: {deviations.by_name[name]}" for name in deviations.beyond()]


def _taken(outputs: Outputs, row: int) -> list[int]:
    """The tokens of a row that a step sampled and accepted."""
    tokens: list[int] = np.asarray(outputs["tokens"])[row].tolist()
    return tokens[: max(0, int(outputs["counts"][row]))] if "counts" in outputs else tokens


def one_after_another(
    planner: StepPlanner, buckets: Sequence[Bucket], count: int = STEPS
) -> Iterator[tuple[Bucket, list[PlannedStep], bool]]:
    """For every bucket its steps and, where it decodes, first those that prefill its requests (False)."""
    smallest = min(bucket for bucket in buckets if kind_of(bucket).chunks)
    for bucket in sorted(buckets, key=lambda bucket: (kind_of(bucket).decodes, bucket.tokens)):
        if kind_of(bucket).chunks:
            yield bucket, planner.of_one_bucket(bucket, count), True
            continue
        rows = planner.rows_of(bucket)[:MOST_ROWS]
        yield bucket, prefills(planner, smallest, rows), False
        base = prompt_tokens(smallest, planner)
        yield bucket, [planner.decode(bucket, rows, base + i) for i in range(count)], True


def prompt_tokens(prefill: Bucket, planner: StepPlanner) -> int:
    """Tokens of the prompts that one step of a bucket prefills: not all that it takes, so that there is padding."""
    return max(1, min(prefill.q_len - 1, planner.limits.max_model_len // 4))


def prefills(planner: StepPlanner, bucket: Bucket, rows: Sequence[PoolPlaces]) -> list[PlannedStep]:
    """Steps that prefill requests from their beginning."""
    count = prompt_tokens(bucket, planner)
    return [planner.prefill(bucket, rows[i : i + bucket.batch], 0, count) for i in range(0, len(rows), bucket.batch)]


def alternation(planner: StepPlanner, buckets: Sequence[Bucket], rounds: int = ROUNDS) -> Iterator[PlannedStep]:
    """All buckets in turns over the same requests; requests whose context would be full begin anew."""
    smallest = min(bucket for bucket in buckets if kind_of(bucket).chunks)
    decoding = [bucket for bucket in buckets if kind_of(bucket).decodes]
    everyone = max((planner.rows_of(bucket)[:MOST_ROWS] for bucket in decoding), key=len)
    prompt, width = prompt_tokens(smallest, planner), planner.limits.drafts + 1
    steps_each, decoded = 0, dict.fromkeys((row.request_slot for row in everyone), 0)
    yield from prefills(planner, smallest, everyone)
    for number in range(rounds):
        if prompt + (steps_each + len(decoding)) * width > planner.limits.max_model_len - width:
            steps_each, decoded = 0, dict.fromkeys(decoded, 0)
            yield from prefills(planner, smallest, everyone)
        for bucket in buckets:
            if kind_of(bucket).chunks:
                anew = everyone[number % len(everyone) :][: bucket.batch]
                count = max(1, min(bucket.q_len - number % 2, prompt))
                yield planner.prefill(bucket, anew, 0, count)
                decoded |= {row.request_slot: count - prompt for row in anew}
                continue
            rows = planner.rows_of(bucket)[:MOST_ROWS]
            yield planner.decode(bucket, rows, max(0, prompt + min(decoded[row.request_slot] for row in rows)))
            decoded |= {row.request_slot: decoded[row.request_slot] + 1 for row in rows}
        steps_each += len(decoding)


def run_buckets(
    executor: Executor,
    read_state: ReadState,
    planner: StepPlanner,
    comparison: Comparison,
    judge: Callable[[str, Callable[[], Judgement]], None],
) -> None:
    """Every bucket after another, with its outputs and the state it leaves.

    Args:
        judge: called with each bucket's name and what runs it, if it is to be run.
    """
    steps_of: dict[Bucket, list[tuple[list[PlannedStep], bool]]] = {}
    for bucket, steps, own in one_after_another(planner, executor.buckets):
        steps_of.setdefault(bucket, []).append((steps, own))
    for bucket, parts in steps_of.items():
        judge(bucket.name, functools.partial(_run_bucket, executor, read_state, comparison, bucket, parts))


def _run_bucket(
    executor: Executor, read_state: ReadState, comparison: Comparison, bucket: Bucket, parts: Sequence[tuple[list[PlannedStep], bool]]
) -> Judgement:
    messages, compared, seconds = len(comparison.messages), comparison.compared, list[float]()
    failures: list[BringupFailure] = []
    for steps, own in parts:
        comparison.forget([row for step in steps for row in step.rows] if not own or kind_of(bucket).chunks else [])
        for step in steps:
            began = time.perf_counter()
            try:
                outputs = executor.launch(step.bucket, list(step.inputs)).result()
            except NpucompileError as error:
                return Judgement([BringupFailure.of("one-session", bucket.name, error, f"{step.bucket.name}: ")], spent=True)
            if own:
                seconds.append(time.perf_counter() - began)
            comparison.add(step.bucket.name, step, outputs)
        if not failures and comparison.too_many and len(comparison.messages) > messages:
            failures = [BringupFailure("one-session", bucket.name, "; ".join(comparison.messages[messages:][:3]))]
        if not failures and (errors := comparison.state_errors(read_state(), steps[-1].rows)):
            failures = [BringupFailure("write-after-read", bucket.name, "the state after its steps: " + "; ".join(errors[:3]))]
    facts = {"rows": comparison.compared - compared, "other_tokens": len(comparison.messages) - messages}
    return Judgement(failures, [Timing(bucket.name, "", min(seconds))], facts)


def run_alternation(executor: Executor, read_state: ReadState, planner: StepPlanner, comparison: Comparison, bar: Bar) -> Judgement:
    """All buckets in turns, each launched before the one ahead of it has been read; then the state of rank 0."""
    launched: deque[tuple[PlannedStep, object]] = deque()
    rows: list[PoolPlaces] = []
    steps = 0

    def finish() -> None:
        step, pending = launched.popleft()
        comparison.add(step.bucket.name, step, pending.result())  # type: ignore[attr-defined]  # a Pending
        bar.step(step.bucket.name)

    try:
        for step in alternation(planner, executor.buckets):
            steps += 1
            rows = step.rows if len(step.rows) > len(rows) else rows  # type: ignore[assignment]
            launched.append((step, executor.launch(step.bucket, list(step.inputs))))
            if len(launched) > executor.run_ahead:
                finish()
        while launched:
            finish()
    except NpucompileError as error:
        return Judgement([BringupFailure.of("alternation", IN_TURNS, error)], spent=True)
    failures = []
    if comparison.too_many:
        failures = [BringupFailure("alternation", IN_TURNS, "; ".join(comparison.messages[:3]))]
    elif errors := comparison.state_errors(read_state(), rows):
        failures = [BringupFailure("alternation", IN_TURNS, "the state after all steps: " + "; ".join(errors[:3]))]
    return Judgement(failures, facts={"steps": steps, "rows": comparison.compared, "other_tokens": len(comparison.messages)})
