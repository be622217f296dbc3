"""Turns an artifact's GE graphs, as they lie on disk, into proof that they are what its manifest says and fit its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...graphs import tree
from ...graphs.errors import NpucompileError, VerifyError
from ...graphs.spmd.partition import Partitioned
from ...graphs.types import DTYPES, Mesh, Rules, leaf_name
from ...lowering import collectives_check
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...lowering.artifact.shards import local_signature
from ...lowering.ascend import inspect_ge
from ...lowering.ascend.ge_file import GROUPS, Container, decode, patched
from ...models.params import avals
from ..build.memory import MemoryPlan, plan_memory
from ..build.targets import target
from .small_model import Case, full, period, rules_of, scaled_layers

PATCHED_BYTES = 2**26
"""Most bytes of graphs, all ranks together, that are really patched: about ten seconds."""


def check_manifest(manifest: Manifest) -> dict[str, float]:
    """The manifest's operands are those of its model on its mesh, and its memory plan follows from them and fits.

    Returns:
        operands, and GiB a rank needs and has.

    Raises:
        VerifyError: naming the first thing that differs.
    """
    model, mesh, dtype = full(manifest), Mesh.parse(manifest.mesh), DTYPES[manifest.dtype]
    wanted = (*tree.leaves("params", avals(model.params(dtype))), *tree.leaves("state", model.state(manifest.limits, dtype)))
    for left, right in zip(wanted, (*manifest.params, *manifest.state), strict=False):
        if left != right:
            ours, theirs = (f"{leaf.name}, {leaf.aval} by {leaf.aval.axes}" for leaf in (left, right))
            raise VerifyError(f"manifest: an operand is {theirs}; the model's is {ours}")
    if len(wanted) != len(manifest.params) + len(manifest.state):
        raise VerifyError(f"manifest: {len(manifest.params) + len(manifest.state)} parameters and pools; the model has {len(wanted)}")
    rules = rules_of(model, mesh)
    if Rules.of(manifest.rules) != rules:
        raise VerifyError(f"manifest: rules are {dict(manifest.rules)}; those of mesh {mesh} are {dict(rules.table)}")
    planned = _check_memory(manifest, rules, leaf_name("params", f"{model.family.DRAFT}."))
    return {"operands": len(wanted), "needed_gib": planned.total_bytes / 2**30, "limit_gib": planned.limit_bytes / 2**30}


def _check_memory(manifest: Manifest, rules: Rules, draft: str) -> MemoryPlan:
    told = MemoryPlan.from_dict(manifest.memory)
    peak = max((entry.memory["peak_bytes"] for entry in manifest.graphs), default=0)
    place = Mesh.parse(manifest.mesh), rules, target(manifest.target)
    again = plan_memory(manifest.params, manifest.state, *place, manifest.limits, peak_bytes=peak, draft=draft)
    found = {part.name: part.nbytes for part in told.parts}
    for part in again.parts:
        # It counts more than the graphs' operands: what ranks talk through.
        if found.get(part.name, 0) < part.nbytes:
            raise VerifyError(f"memory plan: {part.name} takes {found.get(part.name)} bytes; the manifest's operands take {part.nbytes}")
    if not told.fits or told.limit_bytes > again.limit_bytes:
        raise VerifyError(f"memory plan: {told.total_bytes} bytes of {told.limit_bytes}; legal is at most {again.limit_bytes}")
    return told


def check_entry(artifact: Artifact, entry: GraphEntry) -> dict[str, float]:
    """A shipped graph writes its state in place, talks as its certificate says, and has the operators that the manifest counts.

    Returns:
        operators, collectives and donated pools.

    Raises:
        VerifyError: naming the bucket and what is wrong.
    """
    try:
        container = container_of(artifact, entry)
        signature = local_signature(artifact.manifest, entry)
        inspect_ge.check(container, signature)
        collectives_check.agree(entry.collectives, collectives_check.of_container(container))
    except NpucompileError as error:
        raise VerifyError(f"{entry.bucket.name} shipped: {error}") from None
    census = inspect_ge.census(container.graph)
    if census != dict(entry.census):
        differ = sorted({*census.items()} ^ {*entry.census.items()})
        raise VerifyError(f"{entry.bucket.name} shipped: the graph and the manifest count other operators: {differ[:8]}")
    if (container.inputs, container.outputs) != (len(signature.operands), len(signature.outputs)):
        told = f"{len(signature.operands)} and {len(signature.outputs)}"
        has = f"{container.inputs} operands and {container.outputs} results"
        raise VerifyError(f"{entry.bucket.name} shipped: the graph has {has}; the manifest has {told}")
    return {
        "operators": sum(census.values()),
        "collectives": len(entry.collectives),
        "pools": len(container.donations) + len(container.bound),
    }


def container_of(artifact: Artifact, entry: GraphEntry) -> Container:
    """The GE graph of a bucket, read from its file.

    Raises:
        VerifyError: the bucket has none.
    """
    if entry.compiled is None or entry.compiled.backend != "ge":
        raise VerifyError(f"{entry.bucket.name}: the artifact has no GE graph of it; legal is one a bucket: build it with --backend ge")
    return decode((artifact.path / entry.compiled.file).read_bytes())


def check_patched(artifact: Artifact) -> dict[str, float]:
    """Ranks that run what they would load never wait for each other for ever, bucket by bucket.

    Where all ranks' graphs of a bucket are small enough they are really patched, as a rank does when it loads them; of the others the
    certificate is expanded.

    Returns:
        ranks, buckets and how many of them were patched.

    Raises:
        VerifyError: naming the bucket, the ranks and the collective.
    """
    mesh, entries, done = Mesh.parse(artifact.manifest.mesh), artifact.manifest.graphs, 0
    for entry in sorted(entries, key=lambda entry: (artifact.path / entry.compiled.file).stat().st_size if entry.compiled else 0):
        container = container_of(artifact, entry)
        try:
            collectives_check.check_ranks(collectives_check.expand(entry.collectives, mesh))
            if not done or len(container.graph) * mesh.size <= PATCHED_BYTES:
                collectives_check.check_ranks(talks(container, artifact.manifest))
                done += 1
        except NpucompileError as error:
            raise VerifyError(f"{entry.bucket.name} on all ranks: {error}") from None
    return {"ranks": mesh.size, "buckets": len(entries), "patched": done}


def talks(container: Container, manifest: Manifest) -> list[list[collectives_check.Talk]]:
    """What each rank waits for, read from its own patched graph."""
    found, mesh = [], Mesh.parse(manifest.mesh)
    for rank in range(mesh.size):
        mine = {name: mesh.group(name, rank) for name in GROUPS}
        names = {name: f"{name}:{mine[name][0]}" for name in GROUPS}
        found.append(collectives_check.of_rank(patched(container, rank, names), rank, {names[name]: mine[name] for name in GROUPS}))
    return found


def check_likeness(artifact: Artifact, case: Case, partitioned: Partitioned, container: Container) -> dict[str, float]:
    """Shipped graphs of a case's form are the small one with more and larger layers: the same communication, and the same operators.

    Kinds of layers must have the same operators in the same numbers; in prefill, where a longer chunk of tokens is more parts of a
    recurrence, of the same types.

    Returns:
        buckets, kinds of bodies, and collectives compared.

    Raises:
        VerifyError: naming both buckets and what differs.
    """
    kinds = full(artifact.manifest).config.layer_types
    more = len(kinds) - len(scaled_layers(kinds))
    periods = more // period(kinds) if more % period(kinds) == 0 else more
    talk, bodies = partitioned.collectives, _kinds(container, case.form.kind == "decode")
    try:
        collectives_check.agree(talk, collectives_check.of_container(container))
    except NpucompileError as error:
        raise VerifyError(f"{case.bucket.name} small: {error}") from None
    for entry in case.stands_for:
        what = f"{entry.bucket.name} shipped, {case.bucket.name} small"
        _same_talk(what, [one[:2] for one in entry.collectives], [one[:2] for one in talk], periods)
        shipped = _kinds(container_of(artifact, entry), case.form.kind == "decode")
        if shipped != bodies:
            differ = [
                f"{side} has {dict(sorted(kind))}"
                for side, left, right in (("shipped", shipped, bodies), ("small", bodies, shipped))
                for kind in left - right
            ]
            raise VerifyError(f"{what}: kinds of layers have other operators: {'; '.join(differ)}")
    return {"buckets": len(case.stands_for), "kinds": len(bodies), "collectives": len(talk)}


def _kinds(container: Container, counted: bool) -> set[frozenset[tuple[str, int]]]:
    """Operators of every kind of body: types, and numbers where they count."""
    found = inspect_ge.census_by_body(container.graph)
    return {frozenset((name, count if counted else 1) for name, count in body.items()) for prefix, body in found.items() if prefix}


def _same_talk(what: str, shipped: Sequence[tuple[str, ...]], small: Sequence[tuple[str, ...]], periods: int) -> None:
    """So many more periods of layers must repeat a part of the shorter list so often."""
    length, rest = divmod(len(shipped) - len(small), max(periods, 1))
    places = range(length, len(small) + 1) if length >= 0 and not rest else ()
    if list(shipped) not in (list(small[:i]) + list(small[i - length : i]) * periods + list(small[i:]) for i in places):
        raise VerifyError(
            f"{what}: collectives are {Counter(shipped)} and {Counter(small)}; legal are those of {periods} more periods of layers"
        )
