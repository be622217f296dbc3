"""Turns an artifact for several ranks of this machine into proof: run together, in one process, they agree with one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ...graphs.errors import VerifyError
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import partition
from ...graphs.types import COORDS, DTYPES, Mesh, Rules, Signature
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.graph_io import decode
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.artifact.shards import load_shard
from ...lowering.ascend.emulator.emulator import Lockstep
from ...lowering.backends.eager import EagerExecutable
from ...lowering.executable import Executable
from ...lowering.lower import lower_eager
from ...models import step
from ..progress import Progress
from .compare import TOLERANCES, Scene, Tolerance, Verdict, difference, force, judge, scene, verdict
from .small_model import full, rules_of

LARGEST_BYTES = 2**32
"""Most bytes of weights that are held twice, for one device and spread over all ranks."""

SUMMED = Tolerance(1e-4, 1e-4, True, difference)
"""Of float32: ranks add in another order than one device."""


def verify_mesh(artifact: Artifact, progress: Progress) -> dict[str, dict[str, float]]:
    """Runs every bucket's graph on all ranks, in this process, with the artifact's weights; returns what was measured, by bucket name.

    Groups have different requests, from none to full batches; what no live row may read is NaN.

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
    weights, found = artifact.load_weights(), {}
    with progress.bar("verify", len(manifest.graphs)) as bar:
        for entry in manifest.graphs:
            measured = _verify_entry(artifact, entry, weights, shards)
            found[entry.bucket.name] = {name: float(value) for name, value in asdict(measured).items()}
            bar.step(f"{entry.bucket.name} on {manifest.mesh}: logits within {measured.logits_error:.1e}")
    return found


def _verify_entry(
    artifact: Artifact, entry: GraphEntry, weights: Mapping[str, torch.Tensor], shards: Sequence[Mapping[str, torch.Tensor]]
) -> Verdict:
    manifest, mesh = artifact.manifest, Mesh.parse(artifact.manifest.mesh)
    reference, signature = unsharded(manifest, entry)
    ours = Lockstep(decode((artifact.path / entry.reference).read_bytes()), mesh)
    params = [weights[leaf.name] for leaf in manifest.params]
    vocab, dp = int(manifest.model["vocab_size"]), mesh.axis("dp")
    tolerance = SUMMED if DTYPES[manifest.dtype] == torch.float32 else TOLERANCES[DTYPES[manifest.dtype]]
    measured = Verdict()
    for first in sorted({1, entry.bucket.batch // 2 + 1, entry.bucket.batch}):
        generator = torch.Generator().manual_seed(first)
        # The first group has at least a row; others have fewer, or none.
        lives = [(first - group) % (entry.bucket.batch + 1) if group else first for group in range(dp)]
        scenes = [scene(entry.bucket, signature, manifest.limits, params, vocab, live, generator) for live in lives]
        if entry.bucket.kind == "decode":
            for one in scenes:
                force(reference, one, signature)
        measured = measured.worse(_compare(manifest, entry, signature, scenes, shards, reference, ours, tolerance))
    return judge(measured, tolerance, f"{entry.bucket.name} on mesh {mesh} against one device")


def unsharded(manifest: Manifest, entry: GraphEntry) -> tuple[Executable, Signature]:
    """A bucket's step on one device that holds parameters and state as the artifact does, whole."""
    model = full(manifest)
    program = step.program(model, entry.bucket, manifest.limits, DTYPES[manifest.dtype], max_logprobs=entry.max_logprobs)
    made = optimise(partition(program, Mesh(), rules_of(model, Mesh(), entry.bucket)))
    return EagerExecutable(lower_eager(made).graph), made.signature


def _compare(
    manifest: Manifest,
    entry: GraphEntry,
    signature: Signature,
    scenes: Sequence[Scene],
    shards: Sequence[Mapping[str, torch.Tensor]],
    reference: Executable,
    ours: Lockstep,
    tolerance: Tolerance,
) -> Verdict:
    mesh, rules, first = Mesh.parse(manifest.mesh), Rules.of(manifest.rules), len(signature.params)
    last = first + len(signature.state)
    operands = []
    for rank, shard in enumerate(shards):
        one = scenes[mesh.coordinates(rank)["dp"]]
        state = [
            pool[rules.local_slice(leaf.aval, mesh, rank)].clone()
            for leaf, pool in zip(manifest.state, one.operands[first:last], strict=True)
        ]
        given = dict(zip((leaf.path for leaf in signature.inputs), one.operands[last:], strict=True))
        given[COORDS] = mesh.coords(rank)
        operands.append([*(shard[leaf.name] for leaf in manifest.params), *state, *(given[leaf.path] for leaf in entry.inputs)])
    results = ours(operands)
    whole = [[operand.clone() if first <= i < last else operand for i, operand in enumerate(one.operands)] for one in scenes]
    expected = [dict(zip((leaf.path for leaf in signature.outputs), reference(each), strict=True)) for each in whole]
    found = Verdict()
    for rank, given_back in enumerate(results):
        group = mesh.coordinates(rank)["dp"]
        told = dict(zip((leaf.path for leaf in entry.outputs), given_back, strict=True))
        pools = [
            (leaf, whole[group][first + i][rules.local_slice(leaf.aval, mesh, rank)], operands[rank][first + i])
            for i, leaf in enumerate(manifest.state)
        ]
        found = found.worse(verdict(scenes[group], expected[group], told, pools, tolerance.measure))
    return found
