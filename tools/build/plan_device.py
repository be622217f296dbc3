"""Turns a named deployment, or a target and a mesh, into the sizes of a build for NPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graphs.errors import SpecError
from ...graphs.types import Limits, Mesh
from . import deployments as table
from .targets import Target, check_mesh, target

DEFAULT_DRAFTS = 3
"""k where the model has a draft head and nothing else is said: what every published deployment of these models runs."""

MOST_DRAFTS = 7
"""The recurrent kernel verifies at most 8 tokens of a request at once."""


@dataclass(frozen=True)
class Device:
    """What a build for NPUs is decided by.

    Attributes:
        deployment: its id, "" where the sizes were given one by one.
        phase: "mixed", "prefill" or "decode".
        drafts: k, of an instance that only prefills too.
        limits, buckets, prefill: None where the deployment says nothing of them.
    """

    target: Target
    mesh: Mesh
    quantization: str
    drafts: int
    deployment: str = ""
    phase: str = "mixed"
    limits: Limits | None = None
    buckets: tuple[int, ...] | None = None
    prefill: tuple[int, ...] | None = None


def decide(
    model: str,
    *,
    deployment: str | None,
    phase: str | None,
    target_name: str | None,
    mesh: str | None,
    quantization: str | None,
    drafts: int | None,
    drafting: bool,
) -> Device | None:
    """The build for NPUs that was asked for, or that a preset is for; None where it is for this machine.

    Args:
        model: what users call it.
        deployment, phase: a row of the table, and which of its instances.
        target_name, mesh, quantization, drafts: what is said beside the row, and wins over it.
        drafting: whether the model has a draft head.

    Raises:
        SpecError: naming the option and what is legal.
    """
    if drafts is not None and not 0 <= drafts <= MOST_DRAFTS:
        raise SpecError(f"speculative tokens is {drafts}; legal are 0 to {MOST_DRAFTS}: the recurrent kernel verifies no more")
    if drafts and not drafting:
        raise SpecError(f"speculative tokens is {drafts}, and {model} has no draft head; legal is 0")
    drafts = drafts if drafting else 0
    row = table.deployment(deployment) if deployment else None
    if row is None and target_name is None and mesh is None:
        row = table.default_for(model)
    if row is None:
        chosen = target(target_name or "cpu")
        if chosen.backend != "ge":
            return None
        made = Device(chosen, Mesh.parse(mesh or ""), quantization or "none", DEFAULT_DRAFTS if drafts is None else drafts)
        return _checked(made)
    if row.model != model:
        raise SpecError(f"deployment {row.id} is of {row.model}, the model is {model}; `npucompile deployments` lists those of each")
    return _checked(_of_row(row, phase, target_name, mesh, quantization, drafts))


def phases(deployment: str | None, model: str) -> tuple[str, ...]:
    """Instances of a deployment that each need an artifact of their own: "mixed", or "prefill" and "decode"."""
    row = table.deployment(deployment) if deployment else table.default_for(model)
    return tuple(row.phases) if row else ("mixed",)


def _of_row(
    row: table.Deployment, phase: str | None, target_name: str | None, mesh: str | None, quantization: str | None, drafts: int | None
) -> Device:
    if phase is not None and phase not in row.phases:
        raise SpecError(f"deployment {row.id} has no phase {phase!r}; legal are {', '.join(row.phases)}")
    part = row.phase(phase)
    chosen = target(target_name or row.target)
    if chosen.backend != "ge":
        raise SpecError(f"deployment {row.id} is for {row.target}, the target is {chosen.name}; legal are targets that are NPUs")
    if drafts is not None:
        part = replace(part, num_speculative_tokens=drafts)
    scheme = quantization or ("none" if row.quantization == "bf16" else row.quantization)
    chunks = () if part.name == "decode" else (table.prefill_chunk(row),)
    return Device(
        chosen,
        part.mesh if mesh is None else Mesh.parse(mesh),
        scheme,
        part.num_speculative_tokens,
        row.id,
        part.name,
        table.limits_for(row, part, chosen.page_size),
        part.buckets,
        chunks,
    )


def _checked(made: Device) -> Device:
    check_mesh(made.target, made.mesh)
    return made
