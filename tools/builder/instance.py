"""Decides where a build runs: target, mesh, backend and CANN, from options or a published deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graphs.errors import SpecError
from ...graphs.types import Limits, Mesh
from ...lowering.platform import Platform
from . import deployments
from .planned import Options, Plan
from .settings.place import NPU_BACKENDS
from .targets import Target, check_mesh, target

DEFAULT_DRAFTS = 3
"""k by default for a model with a draft head; all published deployments of these models use it."""


@dataclass(frozen=True)
class PlannedInstance:
    """Everything that decides a build besides its model and its sizes.

    Attributes:
        drafts: k, also of an instance that only prefills.
        deployment: id of a published deployment, or "".
        phase: "mixed", "prefill" or "decode".
        limits, buckets: the deployment's; None without one.
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
    expert_parallel: bool = True


def resolve(options: Options, model: str, has_draft_head: bool) -> PlannedInstance:
    """The instance that options name; by default a preset's default deployment, and this machine for a checkpoint directory.

    Args:
        model: its name in deployments.

    Raises:
        SpecError: naming the option and what is legal.
    """
    drafts = options.num_speculative_tokens
    if drafts and not has_draft_head:
        raise SpecError(f"--speculative-tokens {drafts}: {model} has no draft head; legal is 0")
    drafts = drafts if has_draft_head else 0
    row = row_of(model, options)
    if row is None:
        if options.phase:
            raise SpecError(f"--phase {options.phase} is one side of a deployment that splits them; name it, as in --deployment ID")
        k = DEFAULT_DRAFTS if drafts is None else drafts
        instance = PlannedInstance(target(options.target or "cpu"), Mesh.parse(options.mesh or ""), options.quantization or "none", k)
    else:
        instance = _of_row(row, model, options, drafts)
    check_mesh(instance.target, instance.mesh)
    return instance


def row_of(model: str, options: Options) -> deployments.Deployment | None:
    """The published deployment that options name, or the preset's default one; None where they name another place.

    Raises:
        SpecError: there is no deployment of that id.
    """
    if options.deployment:
        return deployments.deployment(options.deployment)
    elsewhere = options.target is not None or options.mesh is not None or options.backend not in (None, *NPU_BACKENDS)
    return None if elsewhere else deployments.default_for(model)


def phases(deployment: str | None, model: str) -> tuple[str, ...]:
    """Phases of a deployment that need an artifact each: "mixed", or "prefill" and "decode"."""
    row = deployments.deployment(deployment) if deployment else deployments.default_for(model)
    return tuple(row.phases) if row else ("mixed",)


def _of_row(row: deployments.Deployment, model: str, options: Options, drafts: int | None) -> PlannedInstance:
    if row.model != model:
        raise SpecError(f"deployment {row.id} is of {row.model}, the model is {model}; `npucompile deployments` lists those of each")
    if options.phase is not None and options.phase not in row.phases:
        raise SpecError(f"deployment {row.id} has no phase {options.phase!r}; legal are {', '.join(row.phases)}")
    part = row.phase(options.phase)
    device = target(options.target or row.target)
    if device.local:
        raise SpecError(f"deployment {row.id} is for {row.target}, the target is {device.name}; legal are targets that are NPUs")
    if drafts is not None:
        part = replace(part, num_speculative_tokens=drafts)
    return PlannedInstance(
        device,
        part.mesh if options.mesh is None else Mesh.parse(options.mesh),
        options.quantization or ("none" if row.quantization == "bf16" else row.quantization),
        part.num_speculative_tokens,
        row.id,
        part.name,
        deployments.limits_for(row, part, device.page_size),
        part.buckets,
        part.ep > 1,
    )


def choose_backend(plan: Plan) -> Plan:
    """The plan with its backend: by default the target's; several ranks on this machine run uncompiled.

    Raises:
        SpecError: it makes nothing that the target runs, or not of this model on this mesh.
    """
    source, target, mesh, requested = plan.source, plan.target, plan.mesh, plan.options.backend
    chosen = requested or target.default_backend(mesh)
    if chosen not in target.backends:
        if chosen in NPU_BACKENDS:
            raise SpecError(f"--backend {chosen} is for NPUs; name a --deployment, or a --target and a --mesh")
        raise SpecError(f"--backend {chosen} makes nothing that {target.name} runs; legal are {', '.join(target.backends)}")
    if target.local and source.checkpoint_dir is None and chosen != "null":
        raise SpecError(
            f"{source.name} is a set of sizes without weights, and --backend {requested or target.backend} runs them; "
            "legal here is --backend null (graphs, costs and memory only), a path to a checkpoint directory, or a build for NPUs "
            "(--target ascend-a3 --mesh tp=2, or a --deployment)"
        )
    if mesh.size > 1 and chosen == "inductor":
        raise SpecError(f"--backend inductor with mesh {mesh}: ranks on this machine run uncompiled; legal are eager and null")
    return replace(plan, backend=chosen)


def choose_platform(plan: Plan) -> Plan:
    """The plan with the release of CANN and the operator packages that graphs are lowered for.

    Raises:
        SpecError: a release, operator packages or kernels for a target without CANN or a backend without GE, or unknown ones.
    """
    target, options = plan.target, plan.options
    if not target.cann and (options.cann or options.operator_packages or options.ge_kernels):
        raise SpecError(
            f"--cann, --operator-packages and --ge-kernels are for NPUs, the target is {target.name}; legal are targets that are NPUs"
        )
    if options.ge_kernels and plan.backend != "ge":
        raise SpecError(f"--ge-kernels {options.ge_kernels} with --backend {plan.backend}; legal is ge, whose compiler takes kernels")
    if (options.no_overlap or options.prefetch_weights) and not target.chip:
        raise SpecError(f"--no-overlap and --prefetch-weights are for NPUs, whose graphs have several streams; the target is {target.name}")
    if options.no_overlap and options.prefetch_weights:
        raise SpecError("--prefetch-weights fetches beside collectives, --no-overlap has nothing beside others; legal is one of them")
    packages = tuple(sorted(set(options.operator_packages)))
    cann, kernels = options.cann or target.cann, options.ge_kernels or ""
    platform = Platform(target.chip, cann, packages, kernels, bool(options.no_overlap), bool(options.prefetch_weights))
    return replace(plan, platform=platform)
