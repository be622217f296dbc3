"""The proof of an artifact for several ranks of this machine: run together in one process, they agree with one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ...graphs.errors import VerifyError
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import partition
from ...graphs.types import DTYPES, Mesh, Rules, Signature
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.graph_io import decode
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.artifact.shards import load_shard
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.backends.eager import EagerExecutable
from ...lowering.executable import Executable
from ...lowering.lower import lower_eager
from ...models import step
from ..agreement.compare import Differences, check_tolerance, output_differences
from ..agreement.executables import load_params
from ..agreement.poisoned_steps import PoisonedStep, plant_drafts, poisoned_step
from ..agreement.tolerances import Tolerance, tolerance_of
from ..artifact_model import full_model, rules_of
from ..progress import Progress
from .all_ranks import run_step

LARGEST_BYTES = 2**32
"""Most bytes of weights: they are in memory once for the reference, and once more in the shards of all ranks."""


def verify_mesh(artifact: Artifact, progress: Progress) -> dict[str, dict[str, float]]:
    """Runs every bucket's graph on all ranks, in this process, with the artifact's weights; returns measurements by bucket name.

    Each dp group has requests of its own, from none to a full batch; whatever a live row must not read is NaN.

    Raises:
        VerifyError: naming the bucket, the measure, its value and the largest legal one; or the weights are too many.
        ArtifactError: the artifact has no weights to run with.
    """
    manifest = artifact.manifest
    size = sum(leaf.aval.nbytes for leaf in manifest.params)
    if size > LARGEST_BYTES:
        raise VerifyError(
            f"{artifact.path}: {size} bytes of weights; legal for running all ranks of {manifest.mesh} in one process is {LARGEST_BYTES}"
        )
    shards = [load_shard(artifact, rank) for rank in range(Mesh.parse(manifest.mesh).size)]
    params, measurements = load_params(artifact), {}
    with progress.bar("verify", len(manifest.graphs)) as bar:
        for entry in manifest.graphs:
            measured = _verify_entry(artifact, entry, params, shards)
            measurements[entry.bucket.name] = {name: float(value) for name, value in asdict(measured).items()}
            bar.step(f"{entry.bucket.name} on {manifest.mesh}: logits within {measured.logits_error:.1e}")
    return measurements


def _verify_entry(
    artifact: Artifact, entry: GraphEntry, params: Sequence[torch.Tensor], shards: Sequence[Mapping[str, torch.Tensor]]
) -> Differences:
    manifest, mesh = artifact.manifest, Mesh.parse(artifact.manifest.mesh)
    reference, signature = unsharded(manifest, entry)
    sharded = Interpreter(decode((artifact.path / entry.reference).read_bytes()), mesh)
    vocab, dp = int(manifest.model["vocab_size"]), mesh.axis("dp")
    tolerance = tolerance_of(DTYPES[manifest.dtype], signature, mesh.size)
    measured = Differences()
    for first in sorted({1, entry.bucket.batch // 2 + 1, entry.bucket.batch}):
        generator = torch.Generator().manual_seed(first)
        # The first group has at least one live row; the others have fewer, or none.
        lives = [(first - group) % (entry.bucket.batch + 1) if group else first for group in range(dp)]
        cases = [poisoned_step(entry.bucket, signature, manifest.limits, params, vocab, live, generator) for live in lives]
        if entry.bucket.kind == "decode":
            for case in cases:
                plant_drafts(reference, case, signature)
        measured = measured.combined(_compare(manifest, entry, signature, cases, shards, reference, sharded, tolerance))
    return check_tolerance(measured, tolerance, f"{entry.bucket.name} on mesh {mesh} against one device")


def unsharded(manifest: Manifest, entry: GraphEntry) -> tuple[Executable, Signature]:
    """A bucket's step on one device, with parameters and state in the form that the artifact has them in, unsplit."""
    model = full_model(manifest)
    program = step.program(model, entry.bucket, manifest.limits, DTYPES[manifest.dtype], max_logprobs=entry.max_logprobs)
    partitioned = optimise(partition(program, Mesh(), rules_of(model, Mesh(), entry.bucket)))
    return EagerExecutable(lower_eager(partitioned).graph), partitioned.signature


def _compare(
    manifest: Manifest,
    entry: GraphEntry,
    signature: Signature,
    cases: Sequence[PoisonedStep],
    shards: Sequence[Mapping[str, torch.Tensor]],
    reference: Executable,
    sharded: Interpreter,
    tolerance: Tolerance,
) -> Differences:
    """Runs each group's case on one device, and all on their ranks together."""
    mesh, rules, first = Mesh.parse(manifest.mesh), Rules.of(manifest.rules), len(signature.params)
    last = first + len(signature.state)
    params = [[shard[leaf.name] for leaf in manifest.params] for shard in shards]
    state = [
        [
            pool[rules.local_slice(leaf.aval, mesh, rank)].clone()
            for leaf, pool in zip(manifest.state, cases[mesh.coordinates(rank)["dp"]].operands[first:last], strict=True)
        ]
        for rank in range(mesh.size)
    ]
    inputs = [dict(zip((leaf.path for leaf in signature.inputs), case.operands[last:], strict=True)) for case in cases]
    results = run_step(sharded, mesh, manifest.signature(entry), params, state, inputs)
    whole = [[operand.clone() if first <= i < last else operand for i, operand in enumerate(case.operands)] for case in cases]
    expected = [dict(zip((leaf.path for leaf in signature.outputs), reference(each), strict=True)) for each in whole]
    differences = Differences()
    for rank, actual in enumerate(results):
        group = mesh.coordinates(rank)["dp"]
        pools = [
            (leaf, whole[group][first + i][rules.local_slice(leaf.aval, mesh, rank)], state[rank][i])
            for i, leaf in enumerate(manifest.state)
        ]
        differences = differences.combined(output_differences(cases[group], expected[group], actual, pools, tolerance.measure))
    return differences
