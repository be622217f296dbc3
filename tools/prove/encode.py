"""The proof of encode buckets on several ranks: each dp group's segments run on all its ranks as on one device, whatever is in padding."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from ..agreement.compare import check_tolerance
from ..agreement.poisoned_steps import ProvedStep, Step
from ..agreement.tolerances import ROUNDED, SUMMED, Tolerance, difference
from ..artifact_model import full_model, rules_of, spreads
from ..ranks.random_weights import random_leaf
from .all_ranks import Run
from .mesh import differences_of_ranks

SMALL_ROWS, SMALL_SEGMENTS = 16, 2
"""Most rows of a segment, and segments, of a small bucket that stands for one of NPUs."""

SMALL_HEADS, TILE = 2, 64
"""Heads of a small tower, and what the width of its feed-forward is one tile more of than the remainder that the tower's own leaves."""

SAME = Tolerance(0.0, 0.0, True, difference)


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

    def compared(reference: Step, alone: Signature, run: Run, signature: Signature, allowed: Tolerance, what: str) -> dict[str, float]:
        params = [random_leaf(leaf, leaf.aval, zlib.crc32(leaf.name.encode())) for leaf in alone.params]
        step = ProvedStep(bucket, alone, limits, params, 0)
        measured = differences_of_ranks(reference, step, run, signature, [params] * mesh.size, mesh, layouts[mesh], allowed.measure)
        return check_tolerance(measured, allowed, f"{bucket.name} on mesh {mesh} against {what}")

    graph, whole = lowered(torch.float32, mesh), lower_eager(partitioned(torch.float32, Mesh()))
    rounds = any(leaf.aval.dtype == torch.int8 for leaf in graph.signature.params)
    run = Interpreter(graph.graph if rounds else shipped(graph), mesh)
    allowed = ROUNDED if rounds else SUMMED
    measured = compared(EagerExecutable(whole.graph), whole.signature, run, graph.signature, allowed, "one device")
    if rounds:
        dtype = DTYPES[manifest.dtype]
        graph, whole = lowered(dtype, mesh), lowered(dtype, Mesh())
        alone = Interpreter(whole.graph, Mesh())
        file = shipped(graph)
        # As for the text's graphs (npu.py): GE may choose another order.
        run = Interpreter(file, mesh, order="reversed-ready") if isinstance(file, GeFile) else Interpreter(file, mesh)
        torch_operators = f"torch operators in {manifest.dtype}"
        compared(lambda operands: alone([operands])[0], whole.signature, run, graph.signature, SAME, torch_operators)
    return {name: measured[name] for name in ("rows", "state_error")}
