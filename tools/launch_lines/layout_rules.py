"""What becomes of flags that spread a model over devices and machines."""

from __future__ import annotations

from typing import Any

from .tables import topics
from .verdicts import MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, rule_of


@rule_of("sglang_tp", "attention_dp", "vllm_tp", "vllm_dp")
def mesh(value: Any, context: Context) -> Verdict:
    """Ranks of an instance, a replica or a group, and groups."""
    mesh = context.facts.mesh
    return Verdict(MAPPED, f"mesh {mesh}, {context.row}" if context.row else f"--mesh {mesh}")


@rule
def sglang_dp(value: Any, context: Context) -> Verdict:
    """Groups of attention, or replicas."""
    verdict = mesh(value, context)
    if context.facts.has("dp_attention") or context.facts.number("attention_dp") or value == 1:
        return verdict
    return Verdict(MAPPED, f"{verdict.why}: replicas are dp groups of one server, which share what experts the model has")


@rule
def dp_attention(value: Any, context: Context) -> Verdict:
    """Data parallel attention."""
    if not value:
        return Verdict(UNNECESSARY, "the mesh says which ranks share a request")
    return mesh(value, context)


@rule
def dp_local(value: Any, context: Context) -> Verdict:
    """Which groups a machine runs."""
    return Verdict(MAPPED, f"torchrun --nnodes {context.facts.nodes} gives each machine its ranks of the mesh")


@rule
def nodes(value: Any, context: Context) -> Verdict:
    """Machines of an instance."""
    if value == 1:
        return Verdict(UNNECESSARY, "serve starts a process for each NPU of this machine")
    return Verdict(MAPPED, f"torchrun --nnodes {value}, the same line on each machine")


@rule
def node_rank(value: Any, context: Context) -> Verdict:
    """Number of a machine."""
    if context.facts.nodes == 1:
        return Verdict(UNNECESSARY, "serve starts a process for each NPU of this machine")
    return Verdict(MAPPED, f"torchrun --node-rank {value}")


@rule
def headless(value: Any, context: Context) -> Verdict:
    """A machine without sockets for clients."""
    return Verdict(UNNECESSARY, "rank 0 alone listens for clients")


@rule
def rendezvous(value: Any, context: Context) -> Verdict:
    """Where ranks meet."""
    if context.facts.nodes == 1:
        return Verdict(UNNECESSARY, "the ranks of one machine need no address to meet")
    host, _, port = str(value).rpartition(":") if ":" in str(value) else (str(value), "", "")
    return Verdict(MAPPED, f"torchrun --master-addr {host}" + (f" --master-port {port}" if port else ""))


@rule
def rendezvous_port(value: Any, context: Context) -> Verdict:
    """The port where ranks meet."""
    if context.facts.nodes == 1:
        return Verdict(UNNECESSARY, "the ranks of one machine need no address to meet")
    return Verdict(MAPPED, f"torchrun --master-port {value}")


@rule
def expert_parallel(value: Any, context: Context) -> Verdict:
    """How experts are spread."""
    size, plan = context.facts.mesh.size, context.proposal.plan
    if context.proposal.deployment:
        return Verdict(MAPPED, context.row)
    if plan is not None and not getattr(plan.model.config, "num_experts", 0):
        return Verdict(UNNECESSARY, "the model has no experts")
    if value is True or value == size:
        return Verdict(MAPPED, f"whole experts are spread over all {size} ranks of the mesh")
    return Verdict(
        REFUSED, f"whole experts are spread over all {size} ranks of a mesh; other groups are built for published deployments alone"
    )


@rule
def device(value: Any, context: Context) -> Verdict:
    """Kind of device."""
    if value in ("npu", "auto", None) or value == context.proposal.target:
        return Verdict(MAPPED, f"--target {context.proposal.target}" if not context.row else context.row)
    return Verdict(REFUSED, f"legal are NPUs and CPUs; {value} is neither, or not what --target of import says")


@rule
def first_device(value: Any, context: Context) -> Verdict:
    """Number of the first NPU."""
    if value == 0:
        return Verdict(UNNECESSARY, "ranks take the NPUs from the first")
    last = value + context.facts.npus_per_node()
    devices = ",".join(map(str, range(value, last)))
    return Verdict(MAPPED, f"ASCEND_RT_VISIBLE_DEVICES={devices}", variables={"ASCEND_RT_VISIBLE_DEVICES": devices})


@rule
def device_ids(value: Any, context: Context) -> Verdict:
    """Numbers of the NPUs."""
    return Verdict(MAPPED, f"ASCEND_RT_VISIBLE_DEVICES={value}", variables={"ASCEND_RT_VISIBLE_DEVICES": str(value)})


@rule
def disaggregation(value: Any, context: Context) -> Verdict:
    """Which part of serving an instance does."""
    if value in (None, "null", "none"):
        return Verdict(UNNECESSARY, "a server prefills and decodes")
    return _one_side(context)


def _one_side(context: Context) -> Verdict:
    if context.proposal.deployment:
        return Verdict(MAPPED, f"build --phase {context.facts.role}, {context.row}; {topics()['transfer'].why}")
    return Verdict(REFUSED, topics()["transfer"].why)


@rule
def kv_transfer(value: Any, context: Context) -> Verdict:
    """vLLM's connector between servers."""
    connector = value.get("kv_connector", "") if isinstance(value, dict) else ""
    if context.facts.role != "mixed":
        return _one_side(context)
    return Verdict(REFUSED, f"{connector or 'the connector'}: {topics()['tiered_cache'].why}")
