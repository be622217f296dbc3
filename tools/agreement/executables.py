"""The proof of an artifact of one device: every executable agrees with the eager reference in full batches, padded ones and row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ...graphs.step_inputs import OPTIONAL_ROWS
from ...graphs.types import DTYPES, Bucket, Signature
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.backend import open_executable
from ...lowering.executable import Executable
from ..heap import give_back_heap
from ..progress import Progress
from .compare import Differences, check_tolerance, compare_all
from .encode_steps import PADDINGS, compare_encode, poisoned_encode
from .poisoned_steps import drafted_step, live_counts
from .tolerances import tolerance_of

SEEDS = 2


def verify(artifact: Artifact, progress: Progress) -> dict[str, dict[str, float]]:
    """Proves every bucket of an artifact; returns measurements by bucket name, as `verify_entry` does.

    Raises:
        VerifyError: naming the bucket, the measure, its value and the largest legal one.
        ArtifactError: the artifact has no weights to run with.
    """
    params, measurements = load_params(artifact), {}
    with progress.bar("verify", len(artifact.manifest.graphs)) as bar:
        for entry in artifact.manifest.graphs:
            measured = dict(verify_entry(artifact, entry, params))
            measurements[entry.bucket.name] = measured
            bar.step(f"{entry.bucket.name} ({entry.backend}) {said(entry.bucket, measured)}")
    return measurements


def said(bucket: Bucket, measured: Mapping[str, float]) -> str:
    """How far the results of a bucket are off, for the terminal."""
    what, name = ("rows", "state_error") if bucket.kind == "encode" else ("logits", "logits_error")
    return f"{what} within {measured[name]:.1e}"


def load_params(artifact: Artifact) -> list[torch.Tensor]:
    """Parameters in the order of the manifest.

    Raises:
        ArtifactError: the artifact has no weights, or other ones than its manifest says.
    """
    weights = artifact.load_weights()
    return [weights[leaf.name] for leaf in artifact.manifest.params]


def verify_entry(artifact: Artifact, entry: GraphEntry, params: Sequence[torch.Tensor]) -> Mapping[str, float]:
    """Compares the executable of a bucket with the eager graph, on whole batches and on single rows without padding.

    Every test case has between one and all rows of the batch live, at random places, and NaN in whatever a live row must not read: the
    null page and slot, unused pages and slots, and the unwritten tail of pages.

    Args:
        params: `load_params` of the artifact, once for all its buckets.

    Returns:
        rows, logits_error, state_error, token_mismatches.

    Raises:
        VerifyError: as for `verify`.
    """
    manifest = artifact.manifest
    signature, params = manifest.signature(entry), [params[i] for i in manifest.operands(entry.bucket)[0]]
    tolerance = tolerance_of(DTYPES[manifest.dtype], signature)
    vocab = int(manifest.model["vocab_size"])
    eager, rows = open_executable(artifact.path / entry.reference, "eager"), _row_by_row(artifact, entry)
    candidate = open_executable(artifact.path / entry.compiled.file, entry.compiled.backend) if entry.compiled else eager
    references = {"the eager graph": eager} | ({"eager rows run alone": rows} if rows else {})
    measured = dict.fromkeys(references, Differences())

    def compared(live: int, seed: int) -> dict[str, Differences]:
        if entry.bucket.kind == "encode":
            one, other = (poisoned_encode(entry.bucket, signature, live, 17 * seed + live, padding) for padding in PADDINGS)
            runs = {name: (reference, candidate, params, (one, other), signature) for name, reference in references.items()}
            return {name: compare_encode(*run, tolerance.measure) for name, run in runs.items()}
        generator = torch.Generator().manual_seed(17 * seed + live)
        case = drafted_step(eager, entry.bucket, signature, manifest.limits, params, vocab, live, generator)
        return compare_all(references, candidate, case, signature, tolerance.measure)

    for live in live_counts(entry.bucket.batch):
        for seed in range(SEEDS):
            # One at a time, the last one gone: each has pools of its own, for all requests that are served at once.
            of_case = compared(live, seed)
            give_back_heap()
            measured = {name: differences.combined(of_case[name]) for name, differences in measured.items()}
    for name, differences in measured.items():
        check_tolerance(differences, tolerance, f"{entry.bucket.name} ({entry.backend}) against {name}")
    return {name: float(value) for name, value in asdict(differences).items()}


def _row_by_row(artifact: Artifact, entry: GraphEntry) -> Executable | None:
    """The bucket's step as single unpadded rows of the batch-1 graph; None where the artifact has no such graph."""
    bucket = Bucket(entry.bucket.kind, 1, entry.bucket.q_len)
    single = next((e for e in (*artifact.manifest.graphs, *artifact.manifest.references) if e.bucket == bucket), None)
    if single is None or entry.bucket.batch == 1:
        return None
    return RowByRow(open_executable(artifact.path / single.reference, "eager"), entry, artifact.manifest.signature(entry))


class RowByRow:
    """Runs the live rows of a batch one after the other through a batch-1 executable."""

    backend = "eager"

    def __init__(self, single: Executable, entry: GraphEntry, signature: Signature) -> None:
        self.single = single
        self.shared = len(signature.params) + len(signature.state)
        self.inputs = [leaf.path for leaf in entry.inputs]
        self.outputs = [(leaf.aval.shape, leaf.aval.dtype) for leaf in entry.outputs]

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the batch; rows of padding are zero."""
        results = [torch.zeros(shape, dtype=dtype) for shape, dtype in self.outputs]
        inputs = dict(zip(self.inputs, operands[self.shared :], strict=True))
        live = inputs["request_slots"] if "request_slots" in inputs else inputs["grids"][:, 0]
        for row in torch.nonzero(live).flatten().tolist():
            own = {name: operand[row : row + 1] for name, operand in inputs.items()} | _own_tables(inputs, row)
            for result, value in zip(results, self.single([*operands[: self.shared], *own.values()]), strict=True):
                result[row] = value[0]
        return results


def _own_tables(inputs: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """The inputs by which one row has the bitmask and adjustments that it has among the others: these are not in the order of rows."""
    own = {}
    for name, whose in OPTIONAL_ROWS.items():
        if name not in inputs:
            continue
        # As many as a bucket of one row takes (`StepInputs.sizes`).
        count = min(len(inputs[name]), 1 if name == "bitmask" else 2)
        places = torch.cat([inputs[rows][row : row + 1] for rows in whose])
        own[name] = inputs[name].index_select(0, (places.expand(count) - 1).clamp(min=0)) if len(places) == 1 or count > 1 else inputs[name]
        own |= {rows: (places[i : i + 1] > 0).to(torch.int32) * min(i + 1, count) for i, rows in enumerate(whose)}
    return own
