"""The proof of encode buckets on several ranks: each dp group's segments run on all its ranks as on one device, whatever is in padding."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...graphs.ir.trace import signature_of
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import partition
from ...graphs.types import Bucket, Mesh, Signature
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.ascend.shipped import DECODERS
from ...lowering.backend import backend
from ...lowering.backends.eager import EagerExecutable
from ...lowering.executable import Executable
from ...lowering.lower import lower_eager
from ...models import encode_step
from ..agreement.compare import Differences, check_tolerance
from ..agreement.encode_steps import PADDINGS, encode_differences, encoded, poisoned_encode
from ..agreement.poisoned_steps import live_counts
from ..agreement.tolerances import ROUNDED, SUMMED, Measure
from ..artifact_model import full_model, rules_of, spreads
from ..ranks.random_weights import random_leaf
from .all_ranks import Run, run_step

SMALL_ROWS, SMALL_SEGMENTS = 16, 2
"""Most rows of a segment, and segments, of a small bucket that stands for one of NPUs."""


def differences_of_ranks(
    reference: Executable,
    params: Sequence[torch.Tensor],
    run: Run,
    shards: Sequence[Sequence[torch.Tensor]],
    mesh: Mesh,
    signatures: tuple[Signature, Signature],
    bucket: Bucket,
    measure: Measure,
) -> Differences:
    """Runs segments of each dp group on one device, and all on their ranks together, with other bytes in padding.

    Args:
        run: all ranks, with `shards` as their parameters.
        signatures: of the graph on one device, and of that of the ranks.
    """
    groups, measured = [mesh.coordinates(rank)["dp"] for rank in range(mesh.size)], Differences()
    for live in live_counts(bucket.batch):
        # The first group has at least one segment; the others have fewer, or none.
        lives = [(live - group) % (bucket.batch + 1) if group else live for group in range(mesh.axis("dp"))]
        alone, together = ([poisoned_encode(bucket, signatures[0], n, n, byte) for n in lives] for byte in PADDINGS)
        expected = [encoded(reference, params, case, signatures[0])[1] for case in alone]
        pools = [[together[group].pool.clone()] for group in groups]
        outputs = run_step(run, mesh, signatures[1], shards, pools, [case.inputs for case in together])
        for group, (pool,), of_rank in zip(groups, pools, outputs, strict=True):
            measured = measured.combined(encode_differences(together[group], expected[group], of_rank["finite"], pool, measure))
    return measured


def verify_small(manifest: Manifest, entry: GraphEntry, cache_dir: Path) -> dict[str, float]:
    """Runs one layer of the tower in float32, with random weights and few patches, as the artifact's backend lowers it, on all ranks.

    Returns:
        rows and state_error.

    Raises:
        VerifyError: it differs from one device by more than is legal.
    """
    model, mesh, chosen = full_model(manifest), Mesh.parse(manifest.mesh), backend(manifest.backend)
    tower, dtype = replace(model.tower, depth=1), torch.float32
    bucket = Bucket("encode", min(entry.bucket.batch, SMALL_SEGMENTS), min(entry.bucket.q_len, SMALL_ROWS * model.tower.merged))
    limits = replace(manifest.limits, picture_rows=2 + bucket.tokens)
    program = encode_step.program(model, tower, bucket, limits, dtype)
    signature, rules = signature_of(program), rules_of(model, mesh, bucket, expert_parallel=spreads(manifest))
    params = [random_leaf(leaf, leaf.aval, zlib.crc32(leaf.name.encode())) for leaf in signature.params]
    reference = EagerExecutable(lower_eager(optimise(partition(program, Mesh(), rules_of(model, Mesh(), bucket)))).graph)
    # For no chip: a graph in another dtype than the artifact's is made to be compared, and no device takes it.
    lowered = chosen.lower(optimise(partition(program, mesh, rules)))
    file = DECODERS[chosen.name](chosen.compile(lowered, cache_dir=cache_dir, threads=0).data)
    tolerance = ROUNDED if any(leaf.aval.dtype == torch.int8 for leaf in signature.params) else SUMMED
    shards, signatures = [params] * mesh.size, (signature, lowered.signature)
    measured = differences_of_ranks(reference, params, Interpreter(file, mesh), shards, mesh, signatures, bucket, tolerance.measure)
    check_tolerance(measured, tolerance, f"{entry.bucket.name} on mesh {mesh} against one device")
    return {"rows": measured.rows, "state_error": measured.state_error}
