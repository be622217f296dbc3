"""Turns an artifact into proof: every executable agrees with the eager reference, in full batches, padded ones, and row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ...graphs.types import DTYPES, Bucket
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.executable import Executable, load_compiled
from ..progress import Progress
from .compare import TOLERANCES, compare, force, judge, scene

SEEDS = 2


def verify(artifact: Artifact, progress: Progress) -> dict[str, dict[str, float]]:
    """Proves every bucket of an artifact; returns what was measured, by bucket name.

    Raises:
        VerifyError: naming the bucket, the measure, its value and the largest legal one.
        ArtifactError: the artifact has no weights to run with.
    """
    found = {}
    with progress.bar("verify", len(artifact.manifest.graphs)) as bar:
        for entry in artifact.manifest.graphs:
            found[entry.bucket.name] = dict(verify_entry(artifact, entry))
            bar.step(f"{entry.bucket.name} ({entry.backend}) logits within {found[entry.bucket.name]['logits_error']:.1e}")
    return found


def verify_entry(artifact: Artifact, entry: GraphEntry) -> Mapping[str, float]:
    """Compares what runs a bucket with the eager reference run one row at a time, without padding.

    Every scene has live rows at random places of the batch, from one to all of them, and NaN in whatever no live row may
    read: the null page and slot, unused pages and slots, unwritten tail of pages. Compiled decode must also equal eager in
    the whole batch, row for row.

    Returns:
        rows, logits_error, state_error, token_mismatches.

    Raises:
        VerifyError: as for `verify`.
    """
    manifest = artifact.manifest
    signature, tolerance = manifest.signature(entry), TOLERANCES[DTYPES[manifest.dtype]]
    weights = artifact.load_weights()
    params = [weights[leaf.name] for leaf in manifest.params]
    vocab = int(manifest.model["vocab_size"])
    scenes = [
        scene(entry.bucket, signature, manifest.limits, params, vocab, live, torch.Generator().manual_seed(17 * seed + live))
        for live in sorted({1, entry.bucket.batch // 2 + 1, entry.bucket.batch})
        for seed in range(SEEDS)
    ]
    eager = load_compiled(artifact.path / entry.reference, "eager")
    if entry.bucket.kind == "decode":
        for one in scenes:
            force(eager, one, signature)
    ours = load_compiled(artifact.path / entry.compiled.file, entry.compiled.backend) if entry.compiled else eager
    what = f"{entry.bucket.name} ({entry.backend})"
    verdict = judge(compare(eager, ours, scenes, signature, tolerance.measure), tolerance, f"{what} against the eager graph")
    alone = _row_by_row(artifact, entry)
    if alone is not None:
        verdict = judge(compare(alone, ours, scenes, signature, tolerance.measure), tolerance, f"{what} against eager rows run alone")
    return {name: float(value) for name, value in asdict(verdict).items()}


def _row_by_row(artifact: Artifact, entry: GraphEntry) -> Executable | None:
    """The bucket's step as single unpadded rows of the batch-1 graph; None where the artifact has no such graph."""
    single = Bucket(entry.bucket.kind, 1, entry.bucket.q_len)
    one = next((e for e in (*artifact.manifest.graphs, *artifact.manifest.references) if e.bucket == single), None)
    if one is None or entry.bucket.batch == 1:
        return None
    return RowByRow(load_compiled(artifact.path / one.reference, "eager"), entry, artifact)


class RowByRow:
    """Runs the live rows of a batch one after the other through a batch-1 executable."""

    backend = "eager"

    def __init__(self, single: Executable, entry: GraphEntry, artifact: Artifact) -> None:
        self.single = single
        manifest = artifact.manifest
        self.shared = len(manifest.params) + len(manifest.state)
        self.seats = self.shared + [leaf.path for leaf in entry.inputs].index("seats")
        self.outputs = [(leaf.aval.shape, leaf.aval.dtype) for leaf in entry.outputs]

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of live rows; rows of padding are zero."""
        results = [torch.zeros(shape, dtype=dtype) for shape, dtype in self.outputs]
        for row in torch.nonzero(operands[self.seats]).flatten().tolist():
            inputs = [operand[row : row + 1] for operand in operands[self.shared :]]
            for result, value in zip(results, self.single([*operands[: self.shared], *inputs]), strict=True):
                result[row] = value[0]
        return results
