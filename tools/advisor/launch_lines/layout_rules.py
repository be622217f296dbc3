"""What becomes of flags that spread a model over devices and machines, and that bound requests, tokens and batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ...builder.settings.place import PREFILL_CP
from ...builder.targets import target
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, rule_of

HANDOVERS = ("MooncakeConnector", "MooncakeConnectorV1", "MooncakeLayerwiseConnector", "NixlConnector")
"""Connectors of vLLM and vllm-ascend by which one server hands a computed prompt to another."""


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


def _of_machines(alone: str, status: str, why: str, value: Any, context: Context) -> Verdict:
    nodes = context.facts.nodes
    return Verdict(UNNECESSARY, alone) if nodes == 1 else Verdict(status, why.format(value=value, nodes=nodes))


_EACH, _NOWHERE = "serve starts a process for each NPU of this machine", "the ranks of one machine need no address to meet"
# What one machine does in any case, and what becomes of the flag where there are several.
for _names, _said in {
    ("dp_local", "dp_start", "dp_rank"): (
        "one server runs all dp groups of the mesh", MAPPED,
        "serve --nnodes {nodes} --node-rank I gives each machine its ranks of the mesh",
    ),
    ("nodes",): (_EACH, CARRIED, "serve --nnodes {value}, a line a machine"),
    ("node_rank",): (_EACH, CARRIED, "serve --node-rank {value}"),
    ("rendezvous",): (_NOWHERE, MAPPED, "serve --master-addr {value}"),
    ("rendezvous_port",): (_NOWHERE, MAPPED, "serve --master-addr HOST:{value}"),
}.items():  # fmt: skip
    rule_of(*_names)(partial(_of_machines, *_said))


@rule_of("prefill_cp", "shares_prompts")
def prefill_cp(value: Any, context: Context) -> Verdict:
    """Ranks that share the tokens of a prompt in attention."""
    count, group = context.facts.prefill_cp, context.facts.mesh.axis("tp")
    if count == 1 or not value:
        return Verdict(UNNECESSARY, "ranks share the heads of attention")
    if count == group:
        return Verdict(MAPPED, context.option(PREFILL_CP.option))
    return Verdict(REFUSED, f"{count} ranks of a group of {group} share a prompt; legal are 1 and {group}")


@rule
def split_of_prompts(value: Any, context: Context) -> Verdict:
    """How ranks share a prompt."""
    if value == "in-seq-split":
        return Verdict(UNNECESSARY, "each rank has two slices of a chunk, one from either end")
    return Verdict(REFUSED, f"{value} gives ranks single tokens; a chunk is shared in two slices a rank, as in-seq-split")


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
    role = context.facts.role
    paired = " --prefill URL" if role == "decode" else ""
    return Verdict(MAPPED, f"{f'build --phase {role}, {context.row}; ' if context.row else ''}serve --role {role}{paired}")


@rule
def transfer_backend(value: Any, context: Context) -> Verdict:
    """Which engine moves keys and values."""
    if context.facts.role == "mixed":
        return Verdict(UNNECESSARY, "a server that prefills and decodes moves nothing")
    return Verdict(MAPPED, f"Mooncake's transfer engine moves pages and states in place of {value}")


@rule
def bootstrap_port(value: Any, context: Context) -> Verdict:
    """Where decode servers ask a prefill server of SGLang."""
    return Verdict(UNNECESSARY, "decode servers ask a prefill server at its --port")


@rule
def handover_timeout(value: Any, context: Context) -> Verdict:
    """How long one side of a pair waits for the other, in seconds."""
    if context.facts.role == "mixed":
        return Verdict(UNNECESSARY, "a server that prefills and decodes waits for no other")
    try:
        seconds = float(value)
    except ValueError:
        return Verdict(REFUSED, f"{value!r} is no number of seconds; legal is serve --handover-timeout SECONDS")
    if seconds <= 0:
        return Verdict(REFUSED, f"{value} is no time to wait; legal is serve --handover-timeout SECONDS with more than 0")
    return Verdict(MAPPED, f"serve --handover-timeout {seconds:g}", ("--handover-timeout", f"{seconds:g}"))


@rule
def kv_transfer(value: Any, context: Context) -> Verdict:
    """vLLM's connector between servers; of several, those that hand over are here."""
    if not isinstance(value, dict):
        return Verdict(REFUSED, "it is no JSON object")
    several = value.get("kv_connector_extra_config", {}).get("connectors") if value.get("kv_connector") == "MultiConnector" else None
    connectors = [each for each in several or [value] if isinstance(each, dict)]
    moving = [each for each in connectors if str(each.get("kv_connector", "")) in HANDOVERS or not several]
    stores = [str(each.get("kv_connector")) for each in connectors if each not in moving]
    if context.facts.role == "mixed":
        return Verdict(REFUSED, f"{value.get('kv_connector') or 'the connector'}: {topics()['tiered_cache'].why}")
    if stores:
        return Verdict(
            REFUSED, f"{', '.join(stores)}: {topics()['tiered_cache'].why}; {_one_side(context).why} takes the place of the others"
        )
    verdict, port = _one_side(context), str(next((each["kv_port"] for each in moving if "kv_port" in each), ""))
    if not port.isdigit():
        return verdict
    # The first port of a rank's there, too (kv_port + its device).
    return replace(verdict, why=f"{verdict.why} --transfer-port {port}", serve=("--transfer-port", port))


@rule
def context(value: Any, context: Context) -> Verdict:
    """Longest request."""
    if context.proposal.deployment:
        return Verdict(MAPPED, context.row)
    ours = context.proposal.arguments.get("max-model-len")
    if ours is None:
        return Verdict(REFUSED, "it is rounded to the pages of a model that is known; say which with --model")
    if str(value) == ours:
        return Verdict(CARRIED, f"--max-model-len {ours}")
    page = target(context.proposal.target).page_size
    if value is not None and value >= int(ours) + page:
        why = f"--max-model-len {ours} is built: {context.proposal.model} takes no more than its own context"
        return Verdict(REFUSED, f"{why}; a config.json that scales the rotation says a longer one")
    why = "the model's own" if value is None or value <= 0 else f"a multiple of {page} tokens"
    return Verdict(MAPPED, f"--max-model-len {ours}: {why}")


@rule_of("sglang_requests", "vllm_requests")
def requests(value: Any, context: Context) -> Verdict:
    """Requests in flight: of all groups together for SGLang, of one for vLLM."""
    ours = context.proposal.arguments.get("max-num-seqs")
    if context.row or ours is None:
        return Verdict(MAPPED, context.row or "the largest of --buckets")
    if str(value) == ours:
        return Verdict(CARRIED, f"--max-num-seqs {ours}")
    groups = context.facts.mesh.axis("dp")
    why = (
        f"{value} in all {groups} dp groups" if context.facts.engine == "sglang" and groups > 1 else "the largest bucket is legal at least"
    )
    return Verdict(MAPPED, f"--max-num-seqs {ours}: {why}")


@rule
def pool(value: Any, context: Context) -> Verdict:
    """Cached tokens."""
    ours = context.proposal.arguments.get("max-total-tokens")
    if context.row:
        return Verdict(MAPPED, context.row)
    if ours == str(value):
        return Verdict(CARRIED, f"--max-total-tokens {ours}")
    if ours is None:
        return Verdict(UNNECESSARY, "every request in flight has room at full length with fewer")
    page = target(context.proposal.target).page_size
    why = "a request at full length takes as many" if int(ours) >= value + page else f"pages of {page} tokens, as many as fit"
    return Verdict(MAPPED, f"--max-total-tokens {ours}: {why}")


@rule
def pool_blocks(value: Any, context: Context) -> Verdict:
    """Blocks of the cache."""
    if context.facts.pool_tokens is None:
        return Verdict(REFUSED, "the line does not say how many tokens a block has (--block-size); legal is --max-total-tokens of build")
    return pool(context.facts.pool_tokens, context)


@rule
def pool_bytes(value: Any, context: Context) -> Verdict:
    """Memory of the cache of a rank."""
    ours = context.proposal.arguments.get("kv-cache-memory")
    if ours is None:
        return Verdict(UNNECESSARY, "a rank has room for fewer tokens than that; see --max-total-tokens of the build")
    return Verdict(MAPPED, f"--kv-cache-memory {ours}: KV pages alone, recurrent states of requests are beside them")


@rule
def memory_share(value: Any, context: Context) -> Verdict:
    """Share of a device's memory for weights and cache."""
    pool = context.proposal.arguments.get("max-total-tokens")
    bound = f"--max-total-tokens {pool} bounds" if pool else "--kv-cache-memory SIZE or --max-total-tokens of build bounds"
    return Verdict(UNNECESSARY, f"{topics()['memory_share'].why}; {bound} the cache")


@rule_of("vllm_chunk", "prefill_tokens", "prefill_prompts")
def prefill(value: Any, context: Context) -> Verdict:
    """Tokens, or prompts, of a prefill step."""
    if context.facts.role == "decode":
        return Verdict(UNNECESSARY, "a decode server prefills nothing")
    return Verdict(MAPPED, context.option("prefill"))


@rule
def sglang_chunk(value: Any, context: Context) -> Verdict:
    """Tokens of a prefill step, all groups together; -1 for whole prompts."""
    verdict = prefill(value, context)
    if verdict.status == UNNECESSARY:
        return verdict
    groups = context.facts.mesh.axis("dp")
    meant = (
        "whole prompts, which a static graph takes in equal chunks"
        if value <= 0
        else f"{value} tokens" + (f" in all {groups} dp groups" if groups > 1 else "")
    )
    return Verdict(MAPPED, f"{verdict.why} ({meant})")


@rule
def page(value: Any, context: Context) -> Verdict:
    """Tokens of a page."""
    size = target(context.proposal.target).page_size
    same = "as asked" if value == size else f"not {value}; no answer depends on it"
    return Verdict(
        CARRIED if value == size else UNNECESSARY, f"pages have {size} tokens, as the attention of {context.proposal.target} wants: {same}"
    )


@rule_of("sglang_buckets", "sglang_max_bucket", "vllm_buckets", "vllm_max_bucket", "no_padding")
def buckets(value: Any, context: Context) -> Verdict:
    """Batch sizes, or tokens, of captured graphs: all of them, the largest, or every one."""
    if context.facts.role == "prefill":
        return Verdict(UNNECESSARY, "a prefill server has no decode steps")
    return Verdict(MAPPED, context.option("buckets"))


@rule
def compilation_config(value: Any, context: Context) -> Verdict:
    """vLLM's modes of compiling and capturing."""
    keys = sorted(value) if isinstance(value, dict) else [str(value)]
    rest = [key for key in keys if key not in ("cudagraph_capture_sizes", "cudagraph_mode")]
    parts = [f"cudagraph_capture_sizes: {buckets(value, context).why}"] if "cudagraph_capture_sizes" in keys else []
    parts += ["cudagraph_mode: every bucket is one static graph in any mode"] if "cudagraph_mode" in keys else []
    parts += [f"{', '.join(rest)}: {topics()['compile'].why}"] if rest else []
    return Verdict(MAPPED if "cudagraph_capture_sizes" in keys else UNNECESSARY, "; ".join(parts) or topics()["compile"].why)
