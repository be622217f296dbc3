"""The proof of an artifact for several ranks of this machine: run together in one process, they agree with one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...graphs.errors import VerifyError
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import partition
from ...graphs.types import COORDS, DTYPES, Leaf, Mesh, Rules
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.graph_io import decode
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.artifact.shards import load_shard
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.backends.eager import EagerExecutable
from ...lowering.executable import Executable
from ...lowering.lower import lower_eager
from ...models import programs
from ...models.sharding_rules import rules_of
from ..agreement.alone import RowAlone, Together, rows_alone
from ..agreement.compare import Differences, check_tolerance
from ..agreement.executables import SEEDS, load_params, said
from ..agreement.poisoned_steps import ProvedStep, live_counts
from ..agreement.tolerances import Measure, tolerance_of
from ..artifact_model import full_model
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
    reference, alone = _one_row(manifest, entry, params)
    sharded = Interpreter(decode((artifact.path / entry.reference).read_bytes()), mesh)
    step = ProvedStep(entry.bucket, manifest.signature(entry), manifest.limits, [], alone.vocab)
    tolerance = tolerance_of(DTYPES[manifest.dtype], alone.signature, mesh.size)
    known = rows_alone(reference, alone, entry.bucket.batch, SEEDS)
    measured = differences_of_ranks(known, step, sharded, shards, mesh, rules, tolerance.measure)
    return check_tolerance(measured, tolerance, f"{entry.bucket.name} on mesh {mesh} against one device")


def steps_of_ranks(
    known: Sequence[RowAlone], step: ProvedStep, mesh: Mesh, rules: Rules
) -> Iterator[tuple[list[Together], list[list[torch.Tensor]]]]:
    """Steps of each dp group with rows that were run alone on one device, and the pools of each rank before them.

    Args:
        step: of a group, as all ranks run it.
    """
    groups, batch, leaves = [mesh.coordinates(rank)["dp"] for rank in range(mesh.size)], step.bucket.batch, step.signature.state
    own = replace(step, signature=replace(step.signature, inputs=tuple(leaf for leaf in step.signature.inputs if leaf.path != COORDS)))
    dealt = Counter[int]()
    for live in live_counts(batch):
        generator = torch.Generator().manual_seed(live)
        # The first group has at least one live row; the others have fewer, or none.
        lives = [(live - group) % (batch + 1) if group else live for group in range(mesh.axis("dp"))]
        steps = [Together(known, own, each, generator, dealt) for each in lives]
        pools = [zip(leaves, steps[group].pools, strict=True) for group in groups]
        yield steps, [[part_of(mesh, rules, rank, *pool).clone() for pool in of_rank] for rank, of_rank in enumerate(pools)]


def part_of(mesh: Mesh, rules: Rules, rank: int, leaf: Leaf, value: torch.Tensor) -> torch.Tensor:
    """What a rank has of values of a pool."""
    return value[rules.local_slice(leaf.aval, mesh, rank)]


def differences_of_ranks(
    known: Sequence[RowAlone],
    step: ProvedStep,
    run: Run,
    shards: Sequence[Sequence[torch.Tensor]],
    mesh: Mesh,
    rules: Rules,
    measure: Measure,
) -> Differences:
    """Runs all ranks, with `shards` as their parameters, in `steps_of_ranks`, and compares each row with what it gave alone."""
    measured = Differences()
    for steps, state in steps_of_ranks(known, step, mesh, rules):
        for rank, outputs in enumerate(run_step(run, mesh, step.signature, shards, state, [each.inputs for each in steps])):
            of_group = steps[mesh.coordinates(rank)["dp"]]
            measured += of_group.compared(outputs, state[rank], measure, partial(part_of, mesh, rules, rank))
    return measured


def _one_row(manifest: Manifest, entry: GraphEntry, params: Sequence[torch.Tensor]) -> tuple[Executable, ProvedStep]:
    """A bucket's step of one row on one device, with parameters and state in the form that the artifact has them in, unsplit."""
    model, bucket = full_model(manifest), replace(entry.bucket, batch=1)
    program = programs.program(model, bucket, manifest.limits, DTYPES[manifest.dtype], max_logprobs=entry.max_logprobs)
    partitioned = optimise(partition(program, Mesh(), rules_of(model.config, Mesh(), bucket)))
    step = ProvedStep(bucket, partitioned.signature, manifest.limits, params, int(manifest.model["vocab_size"]))
    return EagerExecutable(lower_eager(partitioned).graph), step
