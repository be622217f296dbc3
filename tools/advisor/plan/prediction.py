"""Estimated decode steps of published deployments beside a roofline and the published target, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....graphs.errors import SpecError
from ....graphs.steps.table import kind_of
from ....lowering.artifact.artifact import MANIFEST, Artifact, GraphEntry
from ....lowering.ascend.cost.estimate import StepCost
from ...bench.report import Column, ReportTable, Value
from ...builder.deployments import Deployment, deployment, deployments
from ...inspection.cost import step_cost

ACCEPTED = 2.8
"""Tokens a step with k = 3, of the same guide's rows for other models (2.59 to 2.95); none is published for Qwen3.5."""

_COLUMNS = (
    Column("deployment", "deployment"),
    Column("mesh", "mesh"),
    Column("batch", "bucket"),
    Column("context", "context", 0),
    Column("launches", "launches"),
    Column("roofline_ms", "roofline ms", 1),
    Column("step_ms", "step ms", 1),
    Column("launch_share", "launches %", 0),
    Column("memory_share", "memory %", 0),
    Column("matrix_share", "matrix, vector %", 0),
    Column("collectives_share", "collectives %", 0),
    Column("tpot_ms", "ms a token", 1),
    Column("published_ms", "measured ms a token", 1),
    Column("target_ms", "target ms a token", 0),
)
_NOTES = (
    "roofline: HBM bytes of the graph at the nameplate rate, nothing else; step: `npucompile inspect --cost`; shares are of the step",
    "context: prompt and half of the output; bucket: the smallest that holds the published requests in flight, on each group",
    "a token: the step over the tokens that are accepted, without prefill, waiting for requests or the host",
)


def bucket_of(row: Deployment, artifact: Artifact) -> GraphEntry:
    """The decode bucket that the published requests in flight fill.

    Raises:
        SpecError: the row says not how many there were, or the artifact has no bucket for them.
    """
    phase = row.phase()
    if row.concurrency is None:
        raise SpecError(f"deployment {row.id} publishes no requests in flight, so that its step is not known")
    wanted = -(-row.concurrency // (phase.mesh.axis("dp") * phase.instances))
    decode = sorted((e for e in artifact.manifest.graphs if kind_of(e.bucket).decodes), key=lambda e: e.bucket.batch)
    for entry in decode:
        if entry.bucket.batch >= wanted:
            return entry
    sizes = ", ".join(str(entry.bucket.batch) for entry in decode) or "none"
    raise SpecError(f"{artifact.path} has decode buckets {sizes}; {row.id} has {wanted} requests in flight on each group")


def context_of(row: Deployment) -> int:
    """Cached tokens of a request in the middle of its output.

    Raises:
        SpecError: the row publishes no lengths.
    """
    if row.input_len is None or row.output_len is None:
        raise SpecError(f"deployment {row.id} publishes no input and output lengths, so that its step is not known")
    return row.input_len + row.output_len // 2


def row_of(row: Deployment, entry: GraphEntry, cost: StepCost, accepted: float) -> dict[str, Value]:
    """One line of the table.

    Args:
        accepted: tokens a step, where the row does not publish it.
    """
    tokens = row.measured.get("accept_length", accepted if row.num_speculative_tokens else 1.0)
    share = {cause: 100 * ms / cost.step_ms for cause, ms in cost.parts_ms.items()}
    return {
        "deployment": row.id,
        "mesh": str(row.phase().mesh),
        "batch": entry.bucket.batch,
        "context": cost.context,
        "launches": cost.launches,
        "roofline_ms": cost.floor_ms,
        "step_ms": cost.step_ms,
        "launch_share": share["launch"],
        "memory_share": share["memory"],
        "matrix_share": share["matrix"] + share["vector"],
        "collectives_share": share["collectives"],
        "tpot_ms": cost.step_ms / tokens,
        "published_ms": row.measured.get("tpot_ms"),
        "target_ms": row.tpot_target_ms,
    }


def named_row(artifact: Artifact) -> Deployment:
    """The deployment that an artifact was built for.

    Raises:
        SpecError: it was built for none.
    """
    if not artifact.manifest.deployment:
        raise SpecError(f"{artifact.path} was built for no named deployment; legal is one built with --deployment")
    return deployment(artifact.manifest.deployment)


def table(rows: Sequence[dict[str, Value]], accepted: float) -> ReportTable:
    """The table of all rows."""
    assumed = f"{accepted:g} accepted tokens a step are assumed where none are published, with k = 3"
    unmeasured = [row for row in rows if row["published_ms"] is None]
    missing = f"{len(unmeasured)} of {len(rows)} rows publish a target and no measurement: beside those nothing is validated"
    return ReportTable("prediction", "Estimated decode steps of published deployments", _COLUMNS, tuple(rows), (*_NOTES, assumed, missing))


def predictions(directory: Path, accepted: float) -> ReportTable:
    """The estimated decode step of each artifact in a directory, in the order of the published table.

    Raises:
        SpecError: there is no artifact, or one was built for no deployment, or has no bucket or GE graph of the published requests.
    """
    opened = [Artifact.open(manifest.parent) for manifest in sorted(directory.glob(f"*/{MANIFEST}"))]
    if not opened:
        raise SpecError(f"{directory} has no artifacts; build them with `npucompile build MODEL --deployment ID --out {directory}/ID`")
    order = list(deployments())
    rows = []
    for artifact in sorted(opened, key=lambda artifact: order.index(named_row(artifact).id)):
        row = named_row(artifact)
        entry = bucket_of(row, artifact)
        rows.append(row_of(row, entry, step_cost(artifact, entry, context_of(row)), accepted))
    return table(rows, accepted)
