"""The views of `npucompile inspect`: graph for NPUs, collectives, operator census and memory plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.steps.table import STEP_KINDS
from ...graphs.types import DTYPES, Mesh, Rules
from ...lowering import collectives_check
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ...lowering.ascend.launches import kind_of
from ...lowering.ascend.shipped import encoding_of, shipped_graph
from ...lowering.collectives_check import Collective
from ...models import programs
from ...models.slices import Shard, source_bytes
from ..artifact_model import full_model
from ..builder.memory import GIB, MIB, MemoryPlan
from ..builder.targets import target
from .roofline import Roofline, estimate, moved_bytes

GE, ACL = "ge", "aclgraph"


@dataclass(frozen=True)
class InspectView:
    """One view.

    Attributes:
        data: plain values, for --json.
        lines: the same as text.
    """

    data: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    lines: tuple[str, ...]


def is_named(entry: GraphEntry, name: str) -> bool:
    """Whether a user names a bucket so: by its name, or by the batch size of a decode bucket."""
    return name == entry.bucket.name or (STEP_KINDS[entry.bucket.kind].decodes and name == str(entry.bucket.batch))


def ge_graph(artifact: Artifact, entry: GraphEntry) -> InspectView:
    """The graph that an NPU compiles or captures, an operator per line.

    Raises:
        SpecError: the bucket has no graph for NPUs.
    """
    graph = shipped_graph(artifact, entry)
    if graph is None:
        state = f"compiled by {entry.compiled.backend}" if entry.compiled else "not compiled"
        raise SpecError(f"{entry.bucket.name} is {state}; --stage {GE} shows graphs built for NPUs (npucompile build --target ascend-a3)")
    encoding = encoding_of(graph)
    text, fields = encoding.text(graph), {name: getattr(graph, name) for name in encoding.fields}
    return InspectView({"bucket": entry.bucket.name, "stage": encoding.backend, "text": text, **fields}, tuple(text.splitlines()))


def collectives(artifact: Artifact, entry: GraphEntry) -> InspectView:
    """The collectives of a bucket, repetitions folded; checked again for all ranks, and against the shipped graph if there is one.

    Raises:
        LoweringError: the ranks would deadlock, or the shipped graph has other collectives.
    """
    mesh = Mesh.parse(artifact.manifest.mesh)
    per_rank = collectives_check.expand(entry.collectives, mesh)
    collectives_check.check_ranks(per_rank)
    proofs = [f"all {mesh.size} ranks have the same list for each group, and none waits for ever"]
    graph = shipped_graph(artifact, entry)
    if graph is not None:
        collectives_check.agree(entry.collectives, encoding_of(graph).collectives(graph))
        proofs.append(f"the shipped graph has this list, {'on one stream' if graph.ordered else 'in an order that its data fix'}")
    moved, parts = moved_bytes(entry.collectives, mesh, _choices(artifact.manifest)), folded(entry.collectives)
    data = {
        "bucket": entry.bucket.name,
        "mesh": artifact.manifest.mesh,
        "folded": [{"times": times, "collectives": part} for times, part in parts],
        "moved_bytes": moved,
        "proofs": proofs,
        "ranks": [{"rank": rank, "collectives": talks} for rank, talks in enumerate(per_rank)],
    }
    return InspectView(data, tuple(_collective_lines(entry, artifact.manifest.mesh, parts, moved, proofs)))


def census(artifact: Artifact, entry: GraphEntry) -> InspectView:
    """Operator counts of a bucket's graph for NPUs, in total and by body; its cost; and its roofline estimate."""
    graph, manifest = shipped_graph(artifact, entry), artifact.manifest
    bodies = {} if graph is None else encoding_of(graph).bodies(graph)
    mesh = Mesh.parse(manifest.mesh)
    moved = sum(moved_bytes(entry.collectives, mesh, _choices(manifest)).values())
    roof = roofline_of(manifest, entry, mesh)
    data = {
        "bucket": entry.bucket.name,
        "census": dict(entry.census),
        "bodies": bodies,
        "cost": dict(entry.cost),
        "collectives": len(entry.collectives),
        "moved_bytes": moved,
        "roofline": roof.as_dict() if roof else None,
    }
    total = sum(entry.census.values())
    lines = [f"{entry.bucket.name}: {total:,} operators" if total else f"{entry.bucket.name}: no graph for NPUs, so no operators to count"]
    if graph is not None and (facts := encoding_of(graph).launch_facts(graph)):
        data |= facts
        how, copies = "captured" if facts["captured"] else "launched one by one", facts["copied_operands"]
        lines.append(
            f"{facts['launches']:,} launches a step, {how}, and at most {copies:,} copies of operands that are no rows side by side"
        )
        lines.append(f"the host reads lengths {facts['host_reads']} times a step, for attention that may be queued already")
    lines += _body_table(entry.census, bodies)
    cost = entry.cost
    lines.append(
        f"cost of a step on one rank: {cost['flops'] / 1e9:,.1f} GFLOP, {cost['read_bytes'] / 1e9:,.2f} GB read, "
        f"{cost['write_bytes'] / 1e9:,.2f} GB written, {moved / 1e6:,.2f} MB received in {len(entry.collectives)} collectives"
    )
    return InspectView(data, (*lines, *_roofline_lines(roof)))


def memory(manifest: Manifest) -> InspectView:
    """The memory plan of one rank.

    Raises:
        SpecError: the artifact has no memory plan.
    """
    if not manifest.memory:
        raise SpecError(
            f"an artifact for {manifest.target} has no plan of a rank's memory; those built for NPUs have, and `inspect` shows sums"
        )
    model, mesh, rules = full_model(manifest), Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
    params = [param for _, param in tree.flatten(programs.params(model, DTYPES[manifest.dtype]))]
    bound = source_bytes(params, Shard(mesh, rules, 0), torch.bfloat16.itemsize)
    stored = sum(rules.local_aval(leaf.aval, mesh).nbytes for leaf in manifest.params)
    read = f"to load its weights a rank reads {stored / GIB:.2f} GiB where they are stored, {bound / GIB:.2f} GiB of a bfloat16 checkpoint"
    data = dict(manifest.memory) | {"stored_read_bytes": stored, "checkpoint_read_bytes": bound}
    return InspectView(data, (*MemoryPlan.from_dict(manifest.memory).as_table().splitlines(), read))


def environment(manifest: Manifest) -> InspectView:
    """The variables that every rank runs with, and the sizes of its communicators' buffers.

    Raises:
        SpecError: the artifact needs none.
    """
    if not manifest.environment:
        raise SpecError(f"an artifact for {manifest.target} sets no environment variables; those built for NPUs do")
    variables = sorted(manifest.environment.items())
    width = max(len(name) + len(setting.value) for name, setting in variables) + 1
    lines = [f"{f'{name}={setting.value}':<{width}}  {setting.why}" for name, setting in variables]
    buffers = [f"{symbol} {nbytes / MIB:.0f}" for symbol, nbytes in sorted(manifest.communicator_bytes.items())]
    if buffers:
        lines += ["", f"MiB of one buffer of each communicator: {', '.join(buffers)}"]
    values = {name: {"value": setting.value, "why": setting.why} for name, setting in variables}
    return InspectView({"environment": values, "communicator_bytes": dict(manifest.communicator_bytes)}, tuple(lines))


def folded(items: Sequence[Collective]) -> list[tuple[int, list[Collective]]]:
    """The sequence as (times, part) pairs, consecutive repetitions folded into one."""
    parts: list[tuple[int, list[Collective]]] = []
    at = 0
    while at < len(items):
        times, period = _repeats(items, at)
        part = list(items[at : at + period])
        if times == 1 and parts and parts[-1][0] == 1:
            parts[-1][1].extend(part)
        else:
            parts.append((times, part))
        at += times * period
    return parts


def _repeats(items: Sequence[Collective], at: int) -> tuple[int, int]:
    """(times, period) of the longest repetition that starts at `at`, with the shortest period; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, (len(items) - at) // 2 + 1):
        times = 1
        while items[at + times * period : at + (times + 1) * period] == items[at : at + period]:
            times += 1
        if times > 1 and times * period > best[0] * best[1]:
            best = (times, period)
    return best


def _choices(manifest: Manifest) -> int:
    """X of the model; 0 if it has no experts."""
    values = json.loads(manifest.model["config"])
    return int(values.get("text_config", values).get("num_experts_per_tok") or 0)


def roofline_of(manifest: Manifest, entry: GraphEntry, mesh: Mesh) -> Roofline | None:
    """The roofline of a bucket's step on the artifact's target; None where its speeds are unknown."""
    kind = target(manifest.target)
    if kind.npu is None:
        return None
    quantised = manifest.quantization != "none"
    return estimate(entry.cost, entry.collectives, mesh, kind, choices=_choices(manifest), quantised=quantised)


def _roofline_lines(roof: Roofline | None) -> list[str]:
    if roof is None:
        return []
    return [
        f"estimate from nameplate figures of {roof.target}, never measured: arithmetic {roof.arithmetic_s * 1e3:.2f} ms, "
        f"memory {roof.memory_s * 1e3:.2f} ms, links {roof.links_s * 1e3:.2f} ms; {roof.step_s * 1e3:.2f} ms a step",
        "as if kernels were perfect, collectives free to start, each operator's data in device memory, each expert full of rows",
    ]


def _collective_lines(
    entry: GraphEntry, mesh: str, parts: Sequence[tuple[int, Sequence[Collective]]], moved: Mapping[str, int], proofs: Sequence[str]
) -> list[str]:
    received = ", ".join(f"{size / 1e6:,.2f} MB over {group}" for group, size in moved.items())
    lines = [
        f"{entry.bucket.name}: {len(entry.collectives)} collectives a rank, mesh {mesh}"
        + (f"; a rank receives {received}" if received else "")
    ]
    for times, part in parts:
        heads = [f"{times:>4} x |", *["       |"] * (len(part) - 1)] if times > 1 else [" " * 8] * len(part)
        lines += [f"{head} {name:<24} {group:<6} {kind}" for head, (name, group, kind) in zip(heads, part, strict=True)]
    return [*lines, *(f"proved: {proof}" for proof in proofs)]


def _body_table(totals: Mapping[str, int], bodies: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A row per operator type and a column per kind of body; bodies with equal counts share a column."""
    kinds: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for prefix, counts in bodies.items():
        kinds.setdefault(tuple(sorted(counts.items())), []).append(prefix)
    heads = [f"{kind_of(prefixes[0])}{f' x {len(prefixes)}' if len(prefixes) > 1 else ''}" for prefixes in kinds.values()]
    columns = [dict(counts) for counts in kinds]
    wide = max((len(kind) for kind in totals), default=0)
    lines = [f"{'':<{wide}} {'all':>6}  " + "  ".join(heads)] if totals else []
    for kind, count in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        cells = "  ".join(f"{column.get(kind, ''):>{len(head)}}" for column, head in zip(columns, heads, strict=True))
        lines.append(f"{kind:<{wide}} {count:>6}  {cells}".rstrip())
    return lines
