"""The proof of an artifact of one device: in full batches and padded ones every row gives what it gives alone in the eager graph."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...graphs.errors import ArtifactError, VerifyError
from ...graphs.steps.table import kind_of
from ...graphs.types import DTYPES, Bucket
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.artifact.manifest import Manifest
from ...lowering.artifact.mapped import release
from ...lowering.backend import open_executable
from ...lowering.executable import Executable
from ..heap import give_back_heap
from ..progress import Progress
from .alone import RowAlone, Together, owned, rows_alone
from .compare import Differences, check_tolerance
from .poisoned_steps import ProvedStep, live_counts
from .sized import LiveRows, signature_of
from .tolerances import Tolerance, tolerance_of

SEEDS = 2
"""Random test cases of each number of live rows, of buckets that are not so large that one of each has `ENOUGH` rows."""
ENOUGH = 16
SHARING = 4
"""Prompts that share a step of an executable that takes any size, if there is room for so many requests."""


def verify(artifact: Artifact, progress: Progress) -> dict[str, dict[str, float]]:
    """Proves every bucket of an artifact; returns measurements by bucket name, as `Proof.entry` does.

    Raises:
        VerifyError: naming the bucket, the measure, its value and the largest legal one.
        ArtifactError: the artifact has no weights to run with.
    """
    proof, measurements = Proof(artifact), {}
    with progress.bar("verify", len(artifact.manifest.graphs)) as bar:
        for entry in artifact.manifest.graphs:
            measured = dict(proof.entry(artifact, entry))
            measurements[entry.bucket.name] = measured
            bar.step(f"{entry.bucket.name} ({entry.backend}) {said(entry.bucket, measured)}")
    return measurements


def said(bucket: Bucket, measured: Mapping[str, float]) -> str:
    """How far the results of a bucket are off, for the terminal."""
    what, name = ("rows", "state_error") if kind_of(bucket).tower else ("logits", "logits_error")
    return f"{what} within {measured[name]:.1e}"


def load_params(artifact: Artifact) -> list[torch.Tensor]:
    """Parameters in the order of the manifest.

    Raises:
        ArtifactError: the artifact has no weights, or other ones than its manifest says.
    """
    weights = artifact.load_weights()
    return [weights[leaf.name] for leaf in artifact.manifest.params]


class ExecutableDisagrees(VerifyError):
    """Raised where an executable is wrong, and the eager graph that it was compiled from is right."""


class Proof:
    """Proves the buckets of an artifact one by one; rows are run alone once for all buckets of a kind and width."""

    def __init__(self, artifact: Artifact) -> None:
        """Loads the weights.

        Raises:
            ArtifactError: as `load_params`.
        """
        self._params = load_params(artifact)
        self._known = dict[tuple[str, int], list[RowAlone]]()
        self._several, self._proved = set[tuple[str, int]](), set[Bucket]()

    def entry(self, artifact: Artifact, entry: GraphEntry) -> Mapping[str, float]:
        """Compares the executable of a bucket with the eager graph of one row, on whole batches, padded ones and single rows.

        Every test case has between one and all rows of the batch live, at random places, and NaN in whatever a live row must not read: the
        null page and slot, unused pages and slots, and the unwritten tail of pages. A step of half a batch proves the bucket's own eager
        graph, which serves until there is an executable. One that takes any size runs without rows of padding, and of prefill a step of
        several prompts. Graphs of such a kind differ in sizes alone, as the build has seen: the first bucket of several rows proves its
        eager graph and its executable beside padding, the others run the sizes that those before them do not have, beyond `ENOUGH` rows the
        full batch alone. Short prompts are run alone by the eager graph of a bucket of fewer tokens, if there is one.

        Args:
            artifact: that of the weights, with this entry's files.

        Returns:
            rows, logits_error, state_error, token_mismatches.

        Raises:
            VerifyError: as for `verify`; ExecutableDisagrees where the executable alone is wrong.
        """
        eager = open_executable(artifact.path / entry.reference, "eager")
        candidate = open_executable(artifact.path / entry.compiled.file, entry.compiled.backend) if entry.compiled else eager
        try:
            measured = self._rows(artifact, entry, eager, candidate)
        except VerifyError:
            # Another bucket has to prove what those of its kind share.
            self._several.discard((entry.bucket.kind, entry.bucket.q_len))
            raise
        self._forget(artifact.manifest, entry.bucket)
        return measured

    def _forget(self, manifest: Manifest, bucket: Bucket) -> None:
        """Drops the rows of a kind of which each bucket is proved: they are hundreds of megabytes of a large model."""
        kind, self._proved = (bucket.kind, bucket.q_len), self._proved | {bucket}
        if all(entry.bucket in self._proved for entry in manifest.graphs if (entry.bucket.kind, entry.bucket.q_len) == kind):
            self._known.pop(kind, None)

    def _rows(self, artifact: Artifact, entry: GraphEntry, eager: Executable, candidate: Executable) -> dict[str, float]:
        manifest, bucket, signature = artifact.manifest, entry.bucket, artifact.manifest.signature(entry)
        tolerance, proved = tolerance_of(DTYPES[manifest.dtype], signature), self._step(manifest, entry)
        any_size = entry.any_size and entry.compiled is not None
        known, dealt = self._alone(artifact, bucket, candidate if any_size else None), Counter[int]()
        served, counts = candidate, live_counts(bucket.batch)
        # Of one row the eager graph is what ran the rows alone.
        halves = {"eager": eager} if entry.compiled and bucket.batch > 1 else {}
        if any_size:
            served, first = LiveRows(candidate, bucket, signature, manifest.limits), self._first_of_several(bucket)
            halves = halves | {entry.backend: candidate} if first else {}
            counts = counts if first or bucket.batch == 1 else counts[1:] if bucket.batch <= ENOUGH else counts[-1:]
        measured = dict.fromkeys((*halves, entry.backend), Differences())

        def run(name: str, executable: Executable, rows: Sequence[RowAlone], step: ProvedStep, live: int, seed: int) -> None:
            # One at a time, the last one gone: each has pools of its own, for all requests that are served at once. An executable has
            # packed weights of its own, so that the stored ones, which the eager graph reads, need no memory meanwhile.
            if name != "eager":
                release(self._params)
            together = Together(rows, step, live, torch.Generator().manual_seed(seed), dealt)
            measured[name] += together.differences(executable, tolerance.measure)
            del together
            give_back_heap()

        # Steps of one row are cheap, and each row that is known is run as one.
        seeds = len(known) if bucket.batch == 1 else SEEDS if sum(counts) < ENOUGH else 1
        for name, executable in halves.items():
            run(name, executable, known, proved, bucket.batch // 2 + 1, 0)
        for seed, live in itertools.product(range(seeds), counts):
            run(entry.backend, served, known, proved, live, 17 * seed + live)
        if any_size and kind_of(bucket).chunks:
            step = _of_several(proved, short := [row for row in known if row.row.count * SHARING <= bucket.q_len] or known)
            dealt.clear()
            run(entry.backend, LiveRows(candidate, step.bucket, step.signature, manifest.limits), short, step, step.bucket.batch, 0)
        for name, differences in measured.items():
            told = _checked(differences, tolerance, f"{bucket.name} ({name}) against eager rows run alone", of_executable=name != "eager")
        return told

    def _first_of_several(self, bucket: Bucket) -> bool:
        """Whether a bucket of several rows is the first of its kind and width to be proved."""
        kind = (bucket.kind, bucket.q_len)
        first = bucket.batch > 1 and kind not in self._several
        self._several |= {kind} if first else set()
        return first

    def _alone(self, artifact: Artifact, bucket: Bucket, any_size: Executable | None) -> list[RowAlone]:
        """Rows for all buckets that differ from this one in rows, run alone when the first of them is proved.

        Args:
            any_size: the bucket's executable, if it takes any size.
        """
        manifest, kind = artifact.manifest, (bucket.kind, bucket.q_len)
        if kind not in self._known:
            single = _single(manifest, bucket)
            batch = max(entry.bucket.batch for entry in manifest.graphs if (entry.bucket.kind, entry.bucket.q_len) == kind)
            reference = open_executable(artifact.path / single.reference, "eager")
            sharing = SHARING if any_size and kind_of(bucket).chunks else 1
            step = self._step(manifest, single)
            guess = LiveRows(any_size, step.bucket, step.signature, manifest.limits) if any_size else None
            narrower = _narrower(manifest, bucket) if sharing > 1 else None
            short = (open_executable(artifact.path / narrower.reference, "eager"), self._step(manifest, narrower)) if narrower else None
            self._known[kind] = rows_alone(reference, step, batch, SEEDS, sharing, guess, short)
            give_back_heap()
        return self._known[kind]

    def _step(self, manifest: Manifest, entry: GraphEntry) -> ProvedStep:
        params, vocab = self._operands(manifest, entry.bucket), int(manifest.model["vocab_size"])
        return ProvedStep(entry.bucket, manifest.signature(entry), manifest.limits, params, vocab)

    def _operands(self, manifest: Manifest, bucket: Bucket) -> list[torch.Tensor]:
        return [self._params[i] for i in manifest.operands(bucket)[0]]


def _checked(differences: Differences, tolerance: Tolerance, what: str, *, of_executable: bool) -> dict[str, float]:
    try:
        return check_tolerance(differences, tolerance, what)
    except VerifyError as error:
        raise (ExecutableDisagrees(str(error)) if of_executable else error) from None


def _single(manifest: Manifest, bucket: Bucket) -> GraphEntry:
    """The entry of one row of a bucket."""
    wanted = Bucket(bucket.kind, 1, bucket.q_len)
    for entry in (*manifest.graphs, *manifest.references):
        if entry.bucket == wanted:
            return entry
    raise ArtifactError(f"{bucket.name} is proved by the eager graph of {wanted.name}, which the artifact does not have; build it again")


def _narrower(manifest: Manifest, bucket: Bucket) -> GraphEntry | None:
    """The entry of one row whose graph differs from this one's in tokens alone, and has just enough for prompts that share a step."""
    entries = [entry for entry in manifest.graphs if entry.any_size and (entry.bucket.kind, entry.bucket.batch) == (bucket.kind, 1)]
    fits = (entry for entry in entries if entry.bucket.q_len * SHARING <= bucket.q_len)
    return max(fits, key=lambda entry: entry.bucket.q_len, default=None)


def _of_several(step: ProvedStep, rows: Sequence[RowAlone]) -> ProvedStep:
    """A step of as many such rows as there is room for, up to `SHARING`."""
    limits, places = step.limits, [owned(alone.row) for alone in rows]
    pages, pictures = max(len(each.pages) for each in places), max(len(each.pictures) for each in places)
    most = min(SHARING, limits.num_request_slots - 1, (limits.num_pages - 1) // pages)
    bucket = replace(step.bucket, batch=min(most, (limits.picture_rows - 1) // pictures) if pictures else most)
    return replace(step, bucket=bucket, signature=signature_of(bucket, step.signature, limits))
