"""Decides the instance a build is for: target, mesh, quantization and drafts, from options or a published deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graphs.errors import SpecError
from ...graphs.types import Limits, Mesh
from ..notation import PrefillSize
from . import deployments
from .choices import MAX_DRAFTS, NPU_BACKENDS
from .targets import Target, check_mesh, target

DEFAULT_DRAFTS = 3
"""k by default for a model with a draft head; all published deployments of these models use it."""


@dataclass(frozen=True)
class Instance:
    """Everything that decides a build besides its model and its sizes.

    Attributes:
        drafts: k, also of an instance that only prefills.
        deployment: id of a published deployment, or "".
        phase: "mixed", "prefill" or "decode".
        limits, buckets, prefill: the deployment's; None without one.
        expert_parallel: whether whole experts are spread over all ranks; else each is split over a group.
    """

    target: Target
    mesh: Mesh
    quantization: str
    drafts: int
    deployment: str = ""
    phase: str = "mixed"
    limits: Limits | None = None
    buckets: tuple[int, ...] | None = None
    prefill: tuple[PrefillSize, ...] | None = None
    expert_parallel: bool = True


def resolve(
    model: str,
    *,
    backend: str | None,
    deployment: str | None,
    phase: str | None,
    target_name: str | None,
    mesh: str | None,
    quantization: str | None,
    drafts: int | None,
    has_draft_head: bool,
) -> Instance:
    """The instance that options name; by default a preset's default deployment, and this machine for a checkpoint directory.

    Args:
        model: name of the model.
        backend: a backend for this machine overrides a preset's default deployment.
        deployment, phase: a row of the table, and one of its phases.
        target_name, mesh, quantization, drafts: override the row.

    Raises:
        SpecError: naming the option and what is legal.
    """
    if drafts is not None and not 0 <= drafts <= MAX_DRAFTS:
        raise SpecError(f"speculative tokens is {drafts}; legal are 0 to {MAX_DRAFTS}")
    if drafts and not has_draft_head:
        raise SpecError(f"--speculative-tokens {drafts}: {model} has no draft head; legal is 0")
    drafts = drafts if has_draft_head else 0
    row = row_of(model, backend=backend, deployment=deployment, target_name=target_name, mesh=mesh)
    if row is None and phase:
        raise SpecError(f"--phase {phase} is one side of a deployment that splits them; name it, as in --deployment ID")
    if row is None:
        k = DEFAULT_DRAFTS if drafts is None else drafts
        return _checked(Instance(target(target_name or "cpu"), Mesh.parse(mesh or ""), quantization or "none", k))
    if row.model != model:
        raise SpecError(f"deployment {row.id} is of {row.model}, the model is {model}; `npucompile deployments` lists those of each")
    return _checked(_of_row(row, phase, target_name, mesh, quantization, drafts))


def row_of(
    model: str, *, backend: str | None, deployment: str | None, target_name: str | None, mesh: str | None
) -> deployments.Deployment | None:
    """The published deployment that these options name, as in `resolve`, or the preset's default one; None where they name another place.

    Raises:
        SpecError: there is no deployment of that id.
    """
    if deployment:
        return deployments.deployment(deployment)
    elsewhere = target_name is not None or mesh is not None or backend not in (None, *NPU_BACKENDS)
    return None if elsewhere else deployments.default_for(model)


def phases(deployment: str | None, model: str) -> tuple[str, ...]:
    """Phases of a deployment that need an artifact each: "mixed", or "prefill" and "decode"."""
    row = deployments.deployment(deployment) if deployment else deployments.default_for(model)
    return tuple(row.phases) if row else ("mixed",)


def _of_row(
    row: deployments.Deployment,
    phase: str | None,
    target_name: str | None,
    mesh: str | None,
    quantization: str | None,
    drafts: int | None,
) -> Instance:
    if phase is not None and phase not in row.phases:
        raise SpecError(f"deployment {row.id} has no phase {phase!r}; legal are {', '.join(row.phases)}")
    part = row.phase(phase)
    device = target(target_name or row.target)
    if device.local:
        raise SpecError(f"deployment {row.id} is for {row.target}, the target is {device.name}; legal are targets that are NPUs")
    if drafts is not None:
        part = replace(part, num_speculative_tokens=drafts)
    scheme = quantization or ("none" if row.quantization == "bf16" else row.quantization)
    return Instance(
        device,
        part.mesh if mesh is None else Mesh.parse(mesh),
        scheme,
        part.num_speculative_tokens,
        row.id,
        part.name,
        deployments.limits_for(row, part, device.page_size),
        part.buckets,
        () if part.name == "decode" else deployments.prefill_sizes(row),
        part.ep > 1,
    )


def _checked(instance: Instance) -> Instance:
    check_mesh(instance.target, instance.mesh)
    return instance
