"""The proof of encode buckets on several ranks: each dp group's segments run on all its ranks as on one device, whatever is in padding."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...graphs.ir.trace import signature_of
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import Partitioned, partition
from ...graphs.steps.encode import ENCODE
from ...graphs.types import DTYPES, Bucket, Mesh, Signature
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.ascend.ge_file import GeFile
from ...lowering.ascend.shipped import DECODERS, ShippedGraph
from ...lowering.backend import backend
from ...lowering.backends.eager import EagerExecutable
from ...lowering.lower import Lowered, lower_eager
from ...models import encode_step
from ..agreement.compare import Differences, check_tolerance
from ..agreement.encode_steps import PADDINGS, Step, encode_differences, encoded, poisoned_encode
from ..agreement.poisoned_steps import live_counts
from ..agreement.tolerances import ROUNDED, SUMMED, Measure, Tolerance, difference
from ..artifact_model import full_model, rules_of, spreads
from ..ranks.random_weights import random_leaf
from .all_ranks import Run, run_step

SMALL_ROWS, SMALL_SEGMENTS = 16, 2
"""Most rows of a segment, and segments, of a small bucket that stands for one of NPUs."""

SMALL_HEADS, TILE = 2, 64
"""Heads of a small tower, and what the width of its feed-forward is one tile more of than the remainder that the tower's own leaves."""

SAME = Tolerance(0.0, 0.0, True, difference)


def differences_of_ranks(
    reference: Step,
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
            measured += encode_differences(together[group], expected[group], of_rank["finite"], pool, measure)
    return measured


def small_bucket(entry: GraphEntry) -> Bucket:
    """The bucket that stands for one of an artifact; several of them may have the same."""
    (rows,) = (leaf.aval.shape[1] for leaf in entry.inputs if leaf.path == "picture_rows")
    return ENCODE.bucket(min(entry.bucket.batch, SMALL_SEGMENTS), min(rows, SMALL_ROWS) * (entry.bucket.q_len // rows))


def _small(tower: Any) -> Any:
    """One narrow layer of a tower, with heads of its width and parameters in its formats."""
    wide = tower.intermediate_size % TILE + TILE
    return replace(tower, depth=1, num_heads=SMALL_HEADS, hidden_size=SMALL_HEADS * tower.head_dim, intermediate_size=wide)


def verify_small(manifest: Manifest, bucket: Bucket, cache_dir: Path) -> dict[str, float]:
    """Runs a small tower in float32, with random weights and few patches, as the artifact's backend lowers it, on all ranks.

    A tower with matrices of int8 is shipped in the artifact's dtype alone, since torchair converts their products to no float32: its graph
    of torch operators is run in float32, and what is shipped does bit for bit what that graph does in the artifact's dtype.

    Args:
        bucket: of `small_bucket`.

    Returns:
        rows and state_error.

    Raises:
        VerifyError: it differs from one device by more than is legal.
    """
    model, mesh, chosen = full_model(manifest), Mesh.parse(manifest.mesh), backend(manifest.backend)
    tower, limits = _small(model.tower), replace(manifest.limits, picture_rows=2 + bucket.tokens)
    layouts = {each: rules_of(model, each, bucket, expert_parallel=spreads(manifest)) for each in (Mesh(), mesh)}

    def partitioned(dtype: torch.dtype, on: Mesh) -> Partitioned:
        return optimise(partition(encode_step.program(model, tower, bucket, limits, dtype), on, layouts[on]))

    def lowered(dtype: torch.dtype, on: Mesh) -> Lowered:
        # For no chip: a graph in another dtype than the artifact's is made to be compared, and no device takes it.
        return chosen.lower(partitioned(dtype, on))

    def shipped(graph: Lowered) -> ShippedGraph:
        return DECODERS[chosen.name](chosen.compile(graph, cache_dir=cache_dir, threads=0).data)

    def compared(reference: Step, run: Run, dtype: torch.dtype, signature: Signature, allowed: Tolerance, what: str) -> dict[str, float]:
        alone = signature_of(encode_step.program(model, tower, bucket, limits, dtype))
        params = [random_leaf(leaf, leaf.aval, zlib.crc32(leaf.name.encode())) for leaf in alone.params]
        shards = [params] * mesh.size
        measured = differences_of_ranks(reference, params, run, shards, mesh, (alone, signature), bucket, allowed.measure)
        return check_tolerance(measured, allowed, f"{bucket.name} on mesh {mesh} against {what}")

    graph, one_device = lowered(torch.float32, mesh), EagerExecutable(lower_eager(partitioned(torch.float32, Mesh())).graph)
    rounds = any(leaf.aval.dtype == torch.int8 for leaf in graph.signature.params)
    run = Interpreter(graph.graph if rounds else shipped(graph), mesh)
    measured = compared(one_device, run, torch.float32, graph.signature, ROUNDED if rounds else SUMMED, "one device")
    if rounds:
        dtype = DTYPES[manifest.dtype]
        graph, alone = lowered(dtype, mesh), Interpreter(lowered(dtype, Mesh()).graph, Mesh())
        file = shipped(graph)
        # As for the text's graphs (npu.py): GE may choose another order.
        run = Interpreter(file, mesh, order="reversed-ready") if isinstance(file, GeFile) else Interpreter(file, mesh)
        compared(lambda operands: alone([operands])[0], run, dtype, graph.signature, SAME, f"torch operators in {manifest.dtype}")
    return {name: measured[name] for name in ("rows", "state_error")}
