"""What becomes of flags that bound requests, tokens and batches."""

from __future__ import annotations

from typing import Any

from ..build.targets import target
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, rule_of, topic


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
    why = "the model's own" if value is None or value <= 0 else f"a multiple of {page} tokens, at most the model's own context"
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
def chunked_prefill(value: Any, context: Context) -> Verdict:
    """Whether prompts are cut."""
    if value:
        return Verdict(UNNECESSARY, "prompts longer than the largest of --prefill are always taken in chunks")
    return Verdict(REFUSED, "prompts longer than the largest of --prefill are taken in chunks, with the same tokens")


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
def eager(value: Any, context: Context) -> Verdict:
    """No captured graphs."""
    if not value:
        return topic("graphs")
    return Verdict(UNNECESSARY, "graphs are static and proved in any case; --backend eager of build serves uncompiled on CPUs")


@rule
def compilation_config(value: Any, context: Context) -> Verdict:
    """vLLM's modes of compiling and capturing."""
    keys = sorted(value) if isinstance(value, dict) else [str(value)]
    rest = [key for key in keys if key not in ("cudagraph_capture_sizes", "cudagraph_mode")]
    parts = [f"cudagraph_capture_sizes: {buckets(value, context).why}"] if "cudagraph_capture_sizes" in keys else []
    parts += ["cudagraph_mode: every bucket is one static graph in any mode"] if "cudagraph_mode" in keys else []
    parts += [f"{', '.join(rest)}: {topics()['compile'].why}"] if rest else []
    return Verdict(MAPPED if "cudagraph_capture_sizes" in keys else UNNECESSARY, "; ".join(parts) or topics()["compile"].why)
