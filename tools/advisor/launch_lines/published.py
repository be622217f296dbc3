"""Finds the published deployments that a launch line is, by everything that the line says of them."""

from __future__ import annotations

from ...builder.deployments import Deployment, Phase, deployments
from .facts import LaunchFacts

ENGINES = {"sglang": "sglang", "vllm": "vllm-ascend"}


def phase_of(facts: LaunchFacts) -> Phase:
    """The line as a phase of a deployment, which is what sizes are derived from."""
    mesh = facts.mesh
    requests = (facts.group_requests or max(facts.buckets, default=1)) * mesh.axis("dp")
    if facts.engine == "sglang" and (total := facts.number("sglang_requests")) is not None:
        requests = total
    return Phase(
        facts.role,
        mesh,
        ep=mesh.size,
        nodes=facts.nodes,
        instances=1,
        max_running_requests=requests,
        buckets=() if facts.role == "prefill" else facts.buckets,
        num_speculative_tokens=facts.drafts,
        max_total_tokens=facts.pool_tokens,
        context_len=facts.context,
        chunk_len=facts.chunk,
    )


def matching(facts: LaunchFacts, model: str | None, target: str | None) -> list[tuple[Deployment, Phase]]:
    """Rows of a model, with the phase that the line is, whose every published setting the line has.

    Args:
        model: None where the line does not say; then rows of any.
        target: only rows for this target; None where the line does not say.
    """
    wanted = phase_of(facts)
    found = []
    for row in deployments().values():
        if row.engine != ENGINES[facts.engine] or (model and row.model != model) or (target and row.target != target):
            continue
        phase = row.phases.get(facts.role)
        if phase and _same(phase, wanted) and _same_scheme(row, facts) and facts.instances in (1, phase.instances):
            found.append((row, phase))
    return found


def _same(published: Phase, line: Phase) -> bool:
    fields = ("max_running_requests", "buckets", "num_speculative_tokens", "max_total_tokens", "context_len", "chunk_len")
    same_mesh = all(published.mesh.axis(name) == line.mesh.axis(name) for name in ("dp", "tp"))
    return same_mesh and all(getattr(published, name) == getattr(line, name) for name in fields)


def _same_scheme(row: Deployment, facts: LaunchFacts) -> bool:
    """Whether the line's scheme, where it says one, is the row's."""
    scheme = facts.scheme
    return scheme is None or scheme == ("none" if row.quantization == "bf16" else row.quantization)
