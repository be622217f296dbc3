"""The published deployments as cases to predict."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ....graphs.errors import SpecError
from ....graphs.types import Mesh
from ....models.registry import find
from ...builder.deployments import MAX_CHUNK, Deployment, Phase, deployment, deployments, group_chunk
from ...builder.targets import target
from .acceptance import accepted_of, spread_of
from .measurements import MeasuredLoad, facts_of, loads, measured
from .shape import Shape, shape_of
from .system import LoadCase, PlannedLayout, PlannedMachine, PlannedServing, Scheme, System, Workload

INPUT, OUTPUT = 3500, 1500
"""Lengths that are assumed where a row publishes none: those of most rows."""
_REFERENCE = {"dsv32-reference-values": "dsv32-a3x32-pd-64k-1k-30ms"}
"""Rows of values without a launch, and the launch of the same model that is predicted in their place."""
_MEMORY_FRACTION = 0.8
_WAVES = 4
_HOP_S = {"ascend-a3": 0.7e-6, "ascend-a2": 0.5e-6}
"""Between two NPUs of a node: 0.5 us (Huawei MindStudio msmodeling, tensor_cast/device.py, for both), and 0.2 us for the switch that an A3
has between them (its product page), where an A2 has a cable. A read of 1.2 us is measured on an A3 (arXiv:2506.12708), none on an A2."""


@cache
def _shape(model: str) -> Shape:
    return shape_of(find(model))


def machine_of(name: str) -> PlannedMachine:
    """The NPU of a target.

    Raises:
        SpecError: the target is unknown, or its speeds are.
    """
    npu = target(name).npu
    if npu is None:
        raise SpecError(f"speeds of target {name} are not known; legal are ascend-a3 and ascend-a2")
    return PlannedMachine(name, npu, _HOP_S[name])


def case_of(name: str, accepted: float | None = None, known: Collection[str] | None = None) -> LoadCase:
    """The case of a published deployment, or of a load of one.

    Args:
        accepted: tokens a step; by default the row's, or of rows like it.
        known: ids of rows whose acceptance is used where the row's is not: None uses the row's own.

    Raises:
        SpecError: there is no such row.
    """
    if name in loads():
        return _loaded(loads()[name], accepted, known)
    row = deployment(name)
    facts = facts_of(name)
    assumed: list[str] = []
    if name in _REFERENCE:
        like = _REFERENCE[name]
        case = case_of(like, accepted, known)
        return LoadCase(**{**vars(case), "assumed": (*case.assumed, f"{name} is no launch: predicted is that of {like}")})
    shape, phases = _shape(row.model), facts.get("phases", {})
    decoding = row.phase()
    systems = {phase.name: _system(row, phase, shape, phases.get(phase.name, {})) for phase in row.phases.values()}
    workload = _workload(row, decoding, facts, assumed)
    servings = {phase.name: _serving(row, phase, phases.get(phase.name, {}), workload) for phase in row.phases.values()}
    drafts = decoding.num_speculative_tokens
    if accepted is None and drafts:
        own = measured().get(name)
        if own is not None and own.accepted and known is None:
            accepted = own.accepted
        else:
            accepted, why = accepted_of(row.model, drafts, workload.mean_input, workload.mean_output, known)
            assumed.append(why)
    prefill = systems.get("prefill")
    return LoadCase(
        systems[decoding.name],
        servings[decoding.name],
        workload,
        accepted if drafts and accepted else 1.0,
        spread_of(row.model, accepted if drafts and accepted else 1.0),
        prefill,
        servings.get("prefill"),
        tuple(assumed),
    )


def _loaded(load: MeasuredLoad, accepted: float | None, known: Collection[str] | None) -> LoadCase:
    base = case_of(load.deployment, known=known)
    system, serving, row = base.decode, base.serving, deployment(load.deployment)
    shape = _shape(load.model) if load.model else system.shape
    mesh = Mesh.parse(load.mesh) if load.mesh else None
    system = replace(
        system,
        shape=shape,
        scheme=Scheme.named(load.quantization, row.draft_quantization) if load.quantization else system.scheme,
        layout=replace(system.layout, dp=mesh.axis("dp"), tp=mesh.axis("tp")) if mesh else system.layout,
        machine=machine_of(load.target) if load.target else system.machine,
        drafts=system.drafts if load.drafts is None else load.drafts,
        # Sizes of groups of another launch say nothing of its own.
        buckets=() if mesh else system.buckets,
    )
    most = -(-load.max_running // system.layout.dp) if load.max_running else serving.max_running
    serving = replace(serving, policy=load.engine or serving.policy, max_running=most)
    cached = math.floor(load.input_len * load.prefix)
    requests, assumed = load.requests, base.assumed[:0]
    if requests is None:
        requests, assumed = _WAVES * load.concurrency, (f"{_WAVES} requests for each in flight",)
    workload = Workload.uniform(load.input_len, load.output_len, load.concurrency, requests, load.rate, cached)
    if accepted is None:
        same = (load.model, load.drafts) == (None, None) and base.accepted > 1
        accepted, why = base.accepted, f"{base.accepted:.2f} tokens a step, as {load.deployment} has"
        if not same:
            accepted, why = accepted_of(shape.name, system.drafts, load.input_len, load.output_len, known)
        assumed = (*assumed, why)
    return replace(
        base, decode=system, serving=serving, workload=workload, accepted=accepted, spread=spread_of(shape.name, accepted), assumed=assumed
    )


def _system(row: Deployment, phase: Phase, shape: Shape, facts: Mapping[str, Any]) -> System:
    layout = PlannedLayout(
        phase.mesh.axis("dp"),
        phase.mesh.axis("tp"),
        phase.ep > 1,
        facts.get("head_in_group", True),
        facts.get("fused", False),
        phase.instances,
        phase.context_parallel,
    )
    scheme = Scheme.named(row.quantization, row.draft_quantization)
    return System(shape, scheme, layout, machine_of(row.target), phase.num_speculative_tokens, phase.buckets)


def _serving(row: Deployment, phase: Phase, facts: Mapping[str, Any], workload: Workload) -> PlannedServing:
    chunk = group_chunk(row, phase)
    budget = facts.get("prefill_tokens", MAX_CHUNK)
    if chunk is not None:
        budget = min(budget, chunk) if "prefill_tokens" in facts else chunk
    return PlannedServing(
        row.engine.partition("-")[0],
        max(-(-phase.max_running_requests // phase.mesh.axis("dp")), 1),
        budget,
        chunk,
        waits=facts.get("waits", False),
        memory_fraction=phase.mem_fraction or _MEMORY_FRACTION,
        max_tokens=phase.max_total_tokens,
        early_first_s=facts.get("early_first_s"),
    )


def _workload(row: Deployment, phase: Phase, facts: Mapping[str, Any], assumed: list[str]) -> Workload:
    input_len, output_len = facts.get("input_len", row.input_len), facts.get("output_len", row.output_len)
    if input_len is None or output_len is None:
        input_len, output_len = INPUT, OUTPUT
        assumed.append(f"{INPUT} tokens in and {OUTPUT} out: the row publishes no lengths")
    concurrency = facts.get("concurrency", row.concurrency)
    if concurrency is None:
        concurrency = phase.max_running_requests * phase.instances
        assumed.append(f"{concurrency} requests in flight, as many as the launch allows: the row publishes none")
    requests = facts.get("requests")
    if requests is None:
        requests = _WAVES * concurrency
        assumed.append(f"{requests} requests, {_WAVES} for each in flight")
    cached = math.floor(input_len * (row.prefix_hit_rate or 0.0))
    return Workload.uniform(input_len, output_len, concurrency, requests, facts.get("rate"), cached)


def ids() -> tuple[str, ...]:
    """All published deployments."""
    return tuple(deployments())
