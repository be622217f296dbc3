"""The proof of encode buckets on several ranks: each dp group's segments run on all its ranks as on one device, whatever is in padding."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import VerifyError
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import PartitionedProgram, partition
from ...graphs.steps.encode import ENCODE
from ...graphs.types import DTYPES, Bucket, Mesh, Rules, Signature
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.ascend.shipped import ENCODINGS, ShippedGraph
from ...lowering.backend import backend
from ...lowering.backends.eager import EagerExecutable
from ...lowering.lower import LoweredProgram, lower_eager
from ...models import encode_step
from ...models.sharding_rules import rules_of
from ..agreement.alone import RowAlone, rows_alone
from ..agreement.compare import check_tolerance
from ..agreement.executables import SEEDS
from ..agreement.poisoned_steps import ProvedStep
from ..agreement.tolerances import ROUNDED, SUMMED
from ..artifact_model import full_model, spreads
from ..ranks.random_weights import random_leaf
from .all_ranks import Run, run_step
from .mesh import differences_of_ranks, steps_of_ranks

SMALL_ROWS, SMALL_SEGMENTS = 16, 2
"""Most rows of a segment, and segments, of a small bucket that stands for one of NPUs."""

SMALL_HEADS, TILE = 2, 64
"""Heads of a small tower, and what the width of its feed-forward is one tile more of than the remainder that the tower's own leaves."""


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

    def partitioned(dtype: torch.dtype, on: Mesh, bucket: Bucket) -> PartitionedProgram:
        rules = rules_of(model.config, on, bucket, expert_parallel=spreads(manifest))
        return optimise(partition(encode_step.program(model, tower, bucket, limits, dtype), on, rules))

    def lowered(dtype: torch.dtype) -> LoweredProgram:
        # For no chip: a graph in another dtype than the artifact's is made to be compared, and no device takes it.
        return chosen.lower(partitioned(dtype, mesh, bucket))

    def shipped(graph: LoweredProgram) -> ShippedGraph:
        return ENCODINGS[chosen.name].decode(chosen.compile(graph, cache_dir=cache_dir, threads=0).data)

    single, graph = replace(bucket, batch=1), lowered(torch.float32)
    whole, rules = (
        lower_eager(partitioned(torch.float32, Mesh(), single)),
        rules_of(model.config, mesh, bucket, expert_parallel=spreads(manifest)),
    )
    params, rounds = _random(whole.signature), any(leaf.aval.dtype == torch.int8 for leaf in whole.signature.params)
    alone, step = ProvedStep(single, whole.signature, limits, params, 0), ProvedStep(bucket, graph.signature, limits, params, 0)
    known = rows_alone(EagerExecutable(whole.graph), alone, bucket.batch, SEEDS)
    run, allowed = Interpreter(graph.graph if rounds else shipped(graph), mesh), ROUNDED if rounds else SUMMED
    measured = differences_of_ranks(known, step, run, [params] * mesh.size, mesh, rules, allowed.measure)
    told = check_tolerance(measured, allowed, f"{bucket.name} on mesh {mesh} against one device")
    if rounds:
        graph = lowered(DTYPES[manifest.dtype])
        file = shipped(graph)
        # As for the text's graphs (npu.py): GE may choose another order.
        run = Interpreter(file, mesh) if file.ordered else Interpreter(file, mesh, order="reversed-ready")
        _check_same(known, replace(step, signature=graph.signature), (Interpreter(graph.graph, mesh), run), mesh, rules)
    return {name: told[name] for name in ("rows", "state_error")}


def _random(signature: Signature) -> list[torch.Tensor]:
    return [random_leaf(leaf, leaf.aval, zlib.crc32(leaf.name.encode())) for leaf in signature.params]


def _check_same(known: Sequence[RowAlone], step: ProvedStep, runs: tuple[Run, Run], mesh: Mesh, rules: Rules) -> None:
    """Two graphs give the same on all ranks, bit for bit."""
    for steps, state in steps_of_ranks(known, step, mesh, rules):
        inputs, shards = [each.inputs for each in steps], [_random(step.signature)] * mesh.size
        pools = state, [[pool.clone() for pool in of_rank] for of_rank in state]
        results = [run_step(run, mesh, step.signature, shards, own, inputs) for run, own in zip(runs, pools, strict=True)]
        for rank, (ours, theirs) in enumerate(zip(*results, strict=True)):
            pairs = [
                *((ours[name], theirs[name]) for name in ours),
                *((a[1:], b[1:]) for a, b in zip(*(own[rank] for own in pools), strict=True)),
            ]
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
                raise VerifyError(f"{step.bucket.name}: rank {rank} of {mesh} differs from its torch operators; legal is no difference")
