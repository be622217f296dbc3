"""What becomes of flags that a server is started with, and of settings that come in one piece of JSON."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ...builder.settings.model import KV_CACHE_DTYPE, MAX_LOGPROBS
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, topic

ADDITIONAL = {
    "enable_cpu_binding": "cpu_binding",
    "enable_fused_mc2": "moe_dispatch",
    "enable_flashcomm1": "layout",
    "enable_shared_expert_dp": "layout",
    "finegrained_tp_config": "layout",
    "lmhead_tensor_parallel_size": "layout",
    "oproj_tensor_parallel_size": "layout",
    "layer_sharding": "layout",
    "multistream_overlap_shared_expert": "overlap",
    "multistream_overlap_gate": "overlap",
    "enable_async_exponential": "overlap",
    "recompute_scheduler_enable": "recompute",
    "eplb_config": "expert_balance",
    "dynamic_eplb": "expert_balance",
    "torchair_graph_config": "compile",
    "ascend_compilation_config": "compile",
    "ascend_fusion_config": "kernels",
    "weight_prefetch_config": "kernels",
    "ascend_scheduler_config": "one_turn",
    "xlite_graph_config": "engine_choice",
    "dump_config_path": "debug",
    "SLO_limits_for_dynamic_batch": "scheduler_tuning",
    "enable_balance_scheduling": "balance",
    "refresh": "weights_update",
}
"""Topics of the keys of vllm-ascend's --additional-config (user_guide/configuration/additional_config.md); others choose kernels."""


C8 = ("enable_sparse_sfa_c8", "enable_sparse_li_c8", "enable_sparse_c8")
"""Its switches of int8 caches of a sparse attention (Facts.c8)."""

GRPC_PORT = 4317
"""Of OTLP, by its specification; 4318 is that of OTLP over HTTP."""


@rule
def watchdog(value: Any, context: Context) -> Verdict:
    """Most seconds of a step."""
    return Verdict(CARRIED, f"serve --step-timeout {value:g}", ("--step-timeout", f"{value:g}"))


@rule
def log_level(value: Any, context: Context) -> Verdict:
    """How much is logged."""
    if str(value).lower() in ("debug", "info", "trace"):
        return Verdict(MAPPED, "serve --verbose", ("--verbose",))
    return Verdict(UNNECESSARY, "serve logs warnings and errors")


@rule
def log_requests(value: Any, context: Context) -> Verdict:
    """Whether requests are logged."""
    if not value:
        return Verdict(UNNECESSARY, "requests are logged only with --access-log")
    return Verdict(MAPPED, "serve --access-log: a JSON line a request, without its text", ("--access-log",))


@rule
def traces(value: Any, context: Context) -> Verdict:
    """Where spans are sent. Both engines speak gRPC unless told otherwise, whose port is 4317."""
    address = urlsplit(str(value))
    if address.scheme in ("http", "https") and address.port != GRPC_PORT:
        return Verdict(CARRIED, f"serve --otlp-traces-endpoint {value}", ("--otlp-traces-endpoint", str(value)))
    return Verdict(
        REFUSED,
        f"{value} is a collector's gRPC; serve sends a span a request by OTLP over HTTP: --otlp-traces-endpoint http://HOST:4318/v1/traces",
    )


@rule
def traced(value: Any, context: Context) -> Verdict:
    """Whether spans are sent."""
    if context.facts.values.get("traces"):
        return Verdict(UNNECESSARY, "serve sends spans where it has --otlp-traces-endpoint")
    return Verdict(REFUSED, "name the collector: serve --otlp-traces-endpoint http://HOST:4318/v1/traces")


@rule
def api_key(value: Any, context: Context) -> Verdict:
    """Keys of clients."""
    keys = value if isinstance(value, list) else [value]
    if len(keys) > 1:
        return Verdict(REFUSED, "several keys stand in a file, one a line: serve --api-key FILE")
    why = "NPUCOMPILE_API_KEY: all users of a machine can read a command line, so serve takes a key from the environment or a file"
    return Verdict(MAPPED, why, variables={"NPUCOMPILE_API_KEY": str(keys[0])})


@rule
def origins(value: Any, context: Context) -> Verdict:
    """Pages that may use the server."""
    if value == ["*"] or not isinstance(value, list):
        return Verdict(REFUSED, "name each origin: serve --allowed-origin ORIGIN")
    return Verdict(
        MAPPED, "serve --allowed-origin, once for each", tuple(word for each in value for word in ("--allowed-origin", str(each)))
    )


@rule
def chat_template(value: Any, context: Context) -> Verdict:
    """The template of chats."""
    if str(value).endswith((".jinja", ".j2", ".jinja2")) or "/" in str(value):
        return Verdict(CARRIED, f"serve --chat-template {value}", ("--chat-template", str(value)))
    return Verdict(REFUSED, f"{value} names a template of that engine; serve takes the checkpoint's, or a Jinja file with --chat-template")


@rule
def max_logprobs(value: Any, context: Context) -> Verdict:
    """Most log probabilities of a request."""
    if 0 <= value <= MAX_LOGPROBS:
        return Verdict(CARRIED, f"--max-logprobs {value}")
    return Verdict(REFUSED, f"legal are 0 to {MAX_LOGPROBS}, as in OpenAI's API")


@rule
def prefix_caching(value: Any, context: Context) -> Verdict:
    """Whether prefixes are kept for later requests."""
    if value:
        return _kept_states(context) or topic("prefix_cache")
    return Verdict(MAPPED, "serve --no-prefix-cache", ("--no-prefix-cache",))


def _kept_states(context: Context) -> Verdict | None:
    """What is kept of prefixes of a model with recurrent states; None for others, whose prefixes need pages alone."""
    plan = context.proposal.plan
    if plan is None or not plan.has_states:
        return None
    slots = plan.limits.checkpoint_slots
    if "checkpoint-slots" in context.proposal.arguments:
        return Verdict(MAPPED, f"--checkpoint-slots {slots}: {topics()['kept_states'].why}")
    if slots:
        return Verdict(MAPPED, f"{context.row or 'a build for this machine'} has {slots} slots: {topics()['kept_states'].why}")
    return Verdict(REFUSED, f"no prefix is kept: {topics()['kept_states'].why}; this build has none, --checkpoint-slots N adds them")


@rule
def state_slots(value: Any, context: Context) -> Verdict:
    """Most recurrent states, those of requests in flight and those that are kept."""
    kept = None if context.facts.has("no_prefixes_kept") else _kept_states(context)
    return kept or topic("state_cache")


@rule
def no_prefixes_kept(value: Any, context: Context) -> Verdict:
    """Whether no prefixes are kept."""
    return prefix_caching(not value, context)


@rule
def additional_config(value: Any, context: Context) -> Verdict:
    """vllm-ascend's own settings: the strictest of what becomes of its keys."""
    if not isinstance(value, dict):
        return Verdict(REFUSED, "it is no JSON object")
    verdicts = {key: cached(context) if key in C8 else topic(ADDITIONAL.get(key, "kernels")) for key in value}
    refused = [
        f"{key}: {verdict.why}" for key, verdict in verdicts.items() if verdict.status == REFUSED and value[key] not in (False, 0, None)
    ]
    if refused:
        return Verdict(REFUSED, "; ".join(refused))
    status = MAPPED if any(verdict.status == MAPPED for verdict in verdicts.values()) else UNNECESSARY
    return Verdict(status, "; ".join(f"{key}: {verdict.why}" for key, verdict in verdicts.items()) or "it is empty")


def cached(context: Context) -> Verdict:
    """What becomes of the switches of int8 caches of a sparse attention."""
    ours, (latents, keys) = context.proposal.arguments.get(KV_CACHE_DTYPE.option), context.facts.c8
    if ours:
        return Verdict(MAPPED, f"--kv-cache-dtype {ours}")
    if latents and not keys:
        return Verdict(
            REFUSED,
            "latents in int8 beside float keys of indexers are not built; legal are both switches (--kv-cache-dtype int8), "
            "and enable_sparse_li_c8 alone (int8-indexer)",
        )
    return Verdict(UNNECESSARY, "the model has no indexer, and it changes nothing")
