"""Checks of the graphs for NPUs of an artifact on disk: they fit the manifest, the devices and each other, without running."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from ...graphs.errors import NpucompileError, VerifyError
from ...graphs.spmd.partition import PartitionedProgram
from ...graphs.steps.table import kind_of
from ...graphs.types import DTYPES, Mesh, Rules, leaf_name
from ...lowering import collectives_check
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.artifact.shards import local_signature
from ...lowering.ascend.prefetch import FETCHES
from ...lowering.ascend.shipped import ShippedGraph, encoding_of, shipped_graph
from ...models import programs, shrink
from ...models.sharding_rules import rules_of
from ..artifact_model import full_model, spreads
from ..builder.memory import MemoryPlan, plan_memory
from ..builder.targets import target
from .small_model import BucketCase

PATCHED_BYTES = 2**26
"""Most bytes of a bucket's graphs on all ranks for which each rank's graph is patched and read: about ten seconds."""


def check_manifest(manifest: Manifest) -> dict[str, float]:
    """The manifest's operands are those of its model on its mesh, and its memory plan follows from them and fits.

    Returns:
        operands, and needed_gib and limit_gib of a rank.

    Raises:
        VerifyError: naming the first thing that differs.
    """
    model, mesh, dtype = full_model(manifest), Mesh.parse(manifest.mesh), DTYPES[manifest.dtype]
    expected = programs.leaves(model, manifest.limits, dtype).operands
    for left, right in zip(expected, (*manifest.params, *manifest.state), strict=False):
        if left != right:
            ours, theirs = (f"{leaf.name}, {leaf.aval} by {leaf.aval.axes}" for leaf in (left, right))
            raise VerifyError(f"manifest: an operand is {theirs}; the model's is {ours}")
    if len(expected) != len(manifest.params) + len(manifest.state):
        raise VerifyError(f"manifest: {len(manifest.params) + len(manifest.state)} parameters and pools; the model has {len(expected)}")
    rules = rules_of(model.config, mesh, expert_parallel=spreads(manifest))
    if Rules.of(manifest.rules) != rules:
        raise VerifyError(f"manifest: rules are {dict(manifest.rules)}; those of mesh {mesh} are {dict(rules.table)}")
    keys = model.family.draft_key, model.family.tower.key if model.family.tower else ""
    planned = _check_memory(manifest, rules, *(leaf_name("params", f"{key}.") if key else "" for key in keys))
    return {"operands": len(expected), "needed_gib": planned.total_bytes / 2**30, "limit_gib": planned.limit_bytes / 2**30}


def _check_memory(manifest: Manifest, rules: Rules, draft: str, tower: str) -> MemoryPlan:
    stored = MemoryPlan.from_dict(manifest.memory)
    peak = max((entry.memory["peak_bytes"] for entry in manifest.graphs), default=0)
    place = Mesh.parse(manifest.mesh), rules, target(manifest.target)
    minimum = plan_memory(manifest.params, manifest.state, *place, manifest.limits, peak_bytes=peak, draft=draft, tower=tower)
    sizes = {part.name: part.nbytes for part in stored.parts}
    for part in minimum.parts:
        # The stored plan may be larger: it also counts communication buffers, which are no operands.
        if sizes.get(part.name, 0) < part.nbytes:
            raise VerifyError(f"memory plan: {part.name} takes {sizes.get(part.name)} bytes; the manifest's operands take {part.nbytes}")
    if not stored.fits or stored.limit_bytes > minimum.limit_bytes:
        raise VerifyError(f"memory plan: {stored.total_bytes} bytes of {stored.limit_bytes}; legal is at most {minimum.limit_bytes}")
    return stored


def check_entry(artifact: Artifact, entry: GraphEntry) -> dict[str, float]:
    """A shipped graph updates its state in place, and has the collectives and operators that the manifest lists.

    Returns:
        operators, collectives, and pools that are donated.

    Raises:
        VerifyError: naming the bucket and what is wrong.
    """
    try:
        shipped = shipped_file(artifact, entry)
        signature = local_signature(artifact.manifest, entry)
        encoding_of(shipped).check(shipped, signature)
        collectives_check.agree(entry.collectives, encoding_of(shipped).collectives(shipped))
    except NpucompileError as error:
        raise VerifyError(f"{entry.bucket.name} shipped: {error}") from None
    census = encoding_of(shipped).census(shipped)
    if census != dict(entry.census):
        differ = sorted({*census.items()} ^ {*entry.census.items()})
        raise VerifyError(f"{entry.bucket.name} shipped: the graph and the manifest count other operators: {differ[:8]}")
    if (shipped.inputs, shipped.outputs) != (len(signature.operands), len(signature.outputs)):
        listed = f"{len(signature.operands)} and {len(signature.outputs)}"
        actual = f"{shipped.inputs} operands and {shipped.outputs} results"
        raise VerifyError(f"{entry.bucket.name} shipped: the graph has {actual}; the manifest has {listed}")
    return {"operators": sum(census.values()), "collectives": len(entry.collectives), "pools": len(shipped.written)}


def shipped_file(artifact: Artifact, entry: GraphEntry) -> ShippedGraph:
    """Reads the graph for NPUs of a bucket from its file.

    Raises:
        VerifyError: the bucket has none.
    """
    if (graph := shipped_graph(artifact, entry)) is None:
        raise VerifyError(f"{entry.bucket.name}: the artifact has no GE graph of it; legal is one a bucket: build it with --backend ge")
    return graph


def check_patched(artifact: Artifact) -> dict[str, float]:
    """The collectives of all ranks match, bucket by bucket, so that no rank waits forever.

    Where a bucket's graphs are small enough, each rank's is patched as the rank does when it loads it, and its collectives are read; for
    the others the manifest's list of collectives is expanded to all ranks.

    Returns:
        ranks, buckets, and how many of these were patched.

    Raises:
        VerifyError: naming the bucket, the ranks and the collective.
    """
    mesh, entries, patched_buckets = Mesh.parse(artifact.manifest.mesh), artifact.manifest.graphs, 0
    for entry in sorted(entries, key=lambda entry: (artifact.path / entry.compiled.file).stat().st_size if entry.compiled else 0):
        shipped = shipped_file(artifact, entry)
        try:
            collectives_check.check_ranks(collectives_check.expand(entry.collectives, mesh))
            if not patched_buckets or len(shipped.graph) * mesh.size <= PATCHED_BYTES:
                collectives_check.check_ranks(rank_collectives(shipped, artifact.manifest))
                patched_buckets += 1
        except NpucompileError as error:
            raise VerifyError(f"{entry.bucket.name} on all ranks: {error}") from None
    return {"ranks": mesh.size, "buckets": len(entries), "patched": patched_buckets}


def rank_collectives(shipped: ShippedGraph, manifest: Manifest) -> list[list[collectives_check.Talk]]:
    """Collectives of each rank, read from its graph."""
    mesh = Mesh.parse(manifest.mesh)
    return [encoding_of(shipped).of_rank(shipped, rank, mesh) for rank in range(mesh.size)]


def check_small_bucket(artifact: Artifact, case: BucketCase, partitioned: PartitionedProgram, small_file: ShippedGraph) -> dict[str, float]:
    """Shipped graphs of a case's form have the collectives and operators of the small graph, with more and larger layers.

    Each kind of layer must have the same operators in the same numbers. In prefill only their types must be equal, because a longer
    chunk of tokens is unrolled into more parts of a recurrence.

    Returns:
        buckets, kinds of layers, and collectives compared.

    Raises:
        VerifyError: naming both buckets and what differs.
    """
    model, mesh = full_model(artifact.manifest), Mesh.parse(artifact.manifest.mesh)
    small_kinds = model.family.shrink(model.config, mesh.axis("tp"), mesh.size).layer_kinds
    repeats = _repeats(model.config.layer_kinds, small_kinds)
    collectives, small = partitioned.collectives, _kinds(small_file, kind_of(case.bucket).decodes)
    try:
        collectives_check.agree(collectives, encoding_of(small_file).collectives(small_file))
    except NpucompileError as error:
        raise VerifyError(f"{case.bucket.name} small: {error}") from None
    for entry in case.stands_for:
        what = f"{entry.bucket.name} shipped, {case.bucket.name} small"
        _check_collectives(what, [item[:2] for item in entry.collectives], [item[:2] for item in collectives], repeats)
        shipped = _kinds(shipped_file(artifact, entry), kind_of(case.bucket).decodes)
        if shipped != small:
            differ = [
                f"{side} has {dict(sorted(kind))}"
                for side, left, right in (("shipped", shipped, small), ("small", small, shipped))
                for kind in left - right
            ]
            raise VerifyError(f"{what}: kinds of layers have other operators: {'; '.join(differ)}")
    return {"buckets": len(case.stands_for), "kinds": len(small), "collectives": len(collectives)}


def _kinds(shipped: ShippedGraph, counted: bool) -> set[frozenset[tuple[str, int]]]:
    """Launches of every kind of body in a graph: (type of operator, number of them), or (type, 1) where they are not counted. What fetches
    weights computes nothing, and small weights are not worth it."""
    bodies = [body for prefix, body in encoding_of(shipped).launched(shipped).items() if prefix]
    return {frozenset((name, count if counted else 1) for name, count in body.items() if name not in FETCHES) for body in bodies}


def _repeats(kinds: Sequence[str], small: Sequence[str]) -> tuple[int, ...]:
    """How many more times a model repeats parts of a small one: its periods, or the layers of each of its runs.

    Kinds that alternate behind the first run have the same collectives (`shrink.runs`).
    """
    if tuple(kinds[: len(small)]) == tuple(small):
        more, each = len(kinds) - len(small), shrink.period(kinds)
        return (more // each if more % each == 0 else more,)
    runs, few = ([len(list(run)) for _, run in itertools.groupby(each)] for each in (kinds, small))
    if len(runs) != len(few):
        runs, few = ([each[0], sum(each[1:])] for each in (runs, few))
    return tuple(large - less for large, less in zip(runs, few, strict=True))


def _check_collectives(what: str, shipped: Sequence[tuple[str, ...]], small: Sequence[tuple[str, ...]], repeats: Sequence[int]) -> None:
    """The shipped list is the small one with parts of it repeated that many more times, in their order."""
    if not _repeated(list(shipped), list(small), repeats):
        more = " and ".join(map(str, repeats))
        raise VerifyError(
            f"{what}: collectives are {Counter(shipped)} and {Counter(small)}; legal are those of {more} more periods of layers"
        )


def _repeated(shipped: list[tuple[str, ...]], small: list[tuple[str, ...]], repeats: Sequence[int]) -> bool:
    if not repeats:
        return shipped == small
    *before, times = repeats
    for length in range(len(small) + 1):
        extra = length * times
        if extra > len(shipped) - len(small) or (not before and extra != len(shipped) - len(small)):
            continue
        for end in range(length, len(small) + 1):
            last = small[end - length : end] * times + small[end:]
            rest = len(shipped) - len(last)
            if shipped[rest:] == last and _repeated(shipped[:rest], small[:end], before):
                return True
    return False
