"""Measured step times of a bring-up's report on NPUs."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Mesh
from ..advisor.plan.decode import decode_parts
from ..advisor.plan.parameters import PlanParameters
from ..advisor.plan.published import machine_of
from ..advisor.plan.shape import shape_of
from ..advisor.plan.system import PlannedLayout, Scheme, System
from ..builder.deployments import deployments
from ..prove.bringup.archive import NAME
from ..prove.bringup.report import JSON_NAME


@dataclass(frozen=True)
class TimedStep:
    """A decode step that was timed on NPUs."""

    name: str
    system: System
    batch: int
    context: int
    seconds: float

    def predicted_ms(self, parameters: PlanParameters) -> float:
        """The step's time by these parameters, without the host's work around it."""
        parts = decode_parts(self.system, parameters, self.batch, self.context)
        return 1e3 * sum(float(part) for cause, part in parts.items() if cause != "host")


def _report_in(path: Path) -> bytes:
    """The report of a file, or of the archive that it came in."""
    if not path.name.endswith(NAME[NAME.index(".") :]):
        return path.read_bytes()
    with tarfile.open(path) as archive:
        member = archive.extractfile(JSON_NAME)
        return member.read() if member else b""


def read_bringup(path: Path, context: int) -> list[TimedStep]:
    """Decode steps of a bring-up's report.

    Args:
        context: cached tokens of their requests: those of `bringup.steps.StepPlanner.first_decode`.

    Raises:
        SpecError: the file is none, or was not measured on an NPU.
    """
    try:
        report = json.loads(_report_in(path))
        device, mesh = report["device"], Mesh.parse(report["mesh"])
        timings = [timing for rung in report["rungs"] for timing in rung["timings"] if timing["what"].startswith("decode-b")]
        model, kind, quantization = report["model"], report["target"], report["quantization"]
    except (ValueError, KeyError, TypeError, AttributeError, tarfile.TarError):
        raise SpecError(f"{path} is no report of a bring-up; legal is its {JSON_NAME} or {NAME}") from None
    if device != "npu":
        raise SpecError(f"{path} was measured on {device}; legal is a bring-up on NPUs, whose times are theirs")
    shape = shape_of(model)
    row = next((row for row in deployments().values() if row.model == model), None)
    scheme = Scheme.named("bf16" if quantization == "none" else quantization, row.draft_quantization if row else "bf16")
    layout = PlannedLayout(mesh.axis("dp"), mesh.axis("tp"), shape.experts > 0)
    steps = []
    for timing in timings:
        bucket = _bucket_named(timing["what"])
        system = System(shape, scheme, layout, machine_of(kind), bucket.q_len - 1)
        steps.append(TimedStep(f"{path.name} {bucket.name}", system, bucket.batch, context, float(timing["seconds"])))
    if not steps:
        raise SpecError(f"{path} has no timed decode bucket; legal is a bring-up that reached the buckets")
    return steps


def _bucket_named(name: str) -> Bucket:
    """The bucket of a name such as decode-b4-q1."""
    parts = name.split("-")
    if len(parts) != 3 or parts[1][:1] != "b" or parts[2][:1] != "q" or not (parts[1][1:] + parts[2][1:]).isdecimal():
        raise SpecError(f"{name!r} is no bucket; legal is a name as decode-b4-q1")
    return Bucket(parts[0], int(parts[1][1:]), int(parts[2][1:]))
