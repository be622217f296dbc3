"""The proof of an artifact for several ranks of this machine: run together in one process, they agree with one device."""

from __future__ import annotations

from collections.abc import Sequence

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
from ...models import programs
from ..agreement.compare import Differences, check_tolerance, output_differences
from ..agreement.executables import load_params, said
from ..agreement.poisoned_steps import ProvedStep, Step, drafted_step, live_counts, with_other_padding
from ..agreement.poisoned_steps import run_step as run_alone
from ..agreement.tolerances import Measure, tolerance_of
from ..artifact_model import full_model, rules_of
from ..progress import Progress
from .all_ranks import Run, run_step

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
    loaded = (load_shard(artifact, rank) for rank in range(Mesh.parse(manifest.mesh).size))
    shards = [[shard[leaf.name] for leaf in manifest.params] for shard in loaded]
    whole, measurements = load_params(artifact), {}
    with progress.bar("verify", len(manifest.graphs)) as bar:
        for entry in manifest.graphs:
            params, *own = ([each[i] for i in manifest.operands(entry.bucket)[0]] for each in (whole, *shards))
            measured = _verify_entry(artifact, entry, params, own)
            measurements[entry.bucket.name] = measured
            bar.step(f"{entry.bucket.name} on {manifest.mesh}: {said(entry.bucket, measured)}")
    return measurements


def _verify_entry(
    artifact: Artifact, entry: GraphEntry, params: Sequence[torch.Tensor], shards: Sequence[Sequence[torch.Tensor]]
) -> dict[str, float]:
    manifest, mesh, rules = artifact.manifest, Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
    reference, signature = unsharded(manifest, entry)
    sharded = Interpreter(decode((artifact.path / entry.reference).read_bytes()), mesh)
    step = ProvedStep(entry.bucket, signature, manifest.limits, params, int(manifest.model["vocab_size"]))
    tolerance = tolerance_of(DTYPES[manifest.dtype], signature, mesh.size)
    measured = differences_of_ranks(reference, step, sharded, manifest.signature(entry), shards, mesh, rules, tolerance.measure)
    return check_tolerance(measured, tolerance, f"{entry.bucket.name} on mesh {mesh} against one device")


def differences_of_ranks(
    reference: Step,
    step: ProvedStep,
    run: Run,
    signature: Signature,
    shards: Sequence[Sequence[torch.Tensor]],
    mesh: Mesh,
    rules: Rules,
    measure: Measure,
) -> Differences:
    """Runs a step of each dp group on one device, and all on their ranks together.

    Args:
        run: all ranks, with `signature` and `shards` as their parameters.
    """
    groups, leaves, batch = [mesh.coordinates(rank)["dp"] for rank in range(mesh.size)], step.signature.state, step.bucket.batch
    measured, first = Differences(), len(step.signature.params)
    last = first + len(leaves)

    def shares(pools: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [pool[rules.local_slice(leaf.aval, mesh, rank)] for leaf, pool in zip(leaves, pools, strict=True)]

    for live in live_counts(batch):
        generator = torch.Generator().manual_seed(live)
        # The first group has at least one live row; the others have fewer, or none.
        lives = [(live - group) % (batch + 1) if group else live for group in range(mesh.axis("dp"))]
        cases = [drafted_step(reference, step, each, generator) for each in lives]
        state = [[pool.clone() for pool in shares(cases[group].operands[first:last], rank)] for rank, group in enumerate(groups)]
        inputs = [dict(zip((leaf.path for leaf in step.signature.inputs), case.operands[last:], strict=True)) for case in cases]
        inputs = [with_other_padding(case, own) for case, own in zip(cases, inputs, strict=True)]
        expected = [run_alone(reference, case, step.signature) for case in cases]
        for rank, actual in enumerate(run_step(run, mesh, signature, shards, state, inputs)):
            outputs, left = expected[groups[rank]]
            pools = list(zip(leaves, shares(left, rank), state[rank], strict=True))
            measured += output_differences(cases[groups[rank]], outputs, actual, pools, measure)
    return measured


def unsharded(manifest: Manifest, entry: GraphEntry) -> tuple[Executable, Signature]:
    """A bucket's step on one device, with parameters and state in the form that the artifact has them in, unsplit."""
    model = full_model(manifest)
    program = programs.program(model, entry.bucket, manifest.limits, DTYPES[manifest.dtype], max_logprobs=entry.max_logprobs)
    partitioned = optimise(partition(program, Mesh(), rules_of(model, Mesh(), entry.bucket)))
    return EagerExecutable(lower_eager(partitioned).graph), partitioned.signature
