"""What becomes of flags that bound requests, tokens and batches."""

from __future__ import annotations

from typing import Any

from ..build.targets import target
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, topic


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


def _requests(value: Any, context: Context) -> Verdict:
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
def sglang_requests(value: Any, context: Context) -> Verdict:
    """Requests in flight, all groups together."""
    return _requests(value, context)


@rule
def vllm_requests(value: Any, context: Context) -> Verdict:
    """Requests in flight of a group."""
    return _requests(value, context)


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
    return Verdict(MAPPED, f"--max-total-tokens {ours}: pages of {target(context.proposal.target).page_size} tokens, as many as fit")


@rule
def pool_bytes(value: Any, context: Context) -> Verdict:
    """Memory of the cache, in bytes or blocks."""
    return Verdict(
        REFUSED, "legal is --kv-cache-memory SIZE of build, for the pages of a rank alone; `npucompile inspect ARTIFACT --memory` shows all"
    )


def _prefill(value: Any, context: Context) -> Verdict:
    if context.facts.role == "decode":
        return Verdict(UNNECESSARY, "a decode server prefills nothing")
    return Verdict(MAPPED, context.option("prefill"))


@rule
def sglang_chunk(value: Any, context: Context) -> Verdict:
    """Tokens of a prefill step, all groups together; -1 for whole prompts."""
    verdict = _prefill(value, context)
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
def vllm_chunk(value: Any, context: Context) -> Verdict:
    """Tokens of a step of a group."""
    return _prefill(value, context)


@rule
def prefill_tokens(value: Any, context: Context) -> Verdict:
    """Tokens of all prompts of a step."""
    return _prefill(value, context)


@rule
def prefill_prompts(value: Any, context: Context) -> Verdict:
    """Prompts of a step."""
    return _prefill(value, context)


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


def _buckets(value: Any, context: Context) -> Verdict:
    if context.facts.role == "prefill":
        return Verdict(UNNECESSARY, "a prefill server has no decode steps")
    return Verdict(MAPPED, context.option("buckets"))


@rule
def sglang_buckets(value: Any, context: Context) -> Verdict:
    """Captured batch sizes of a group."""
    return _buckets(value, context)


@rule
def sglang_max_bucket(value: Any, context: Context) -> Verdict:
    """The largest captured batch size."""
    return _buckets(value, context)


@rule
def vllm_buckets(value: Any, context: Context) -> Verdict:
    """Captured tokens of a step: those of a request are one and its drafts."""
    return _buckets(value, context)


@rule
def vllm_max_bucket(value: Any, context: Context) -> Verdict:
    """The largest captured step."""
    return _buckets(value, context)


@rule
def no_padding(value: Any, context: Context) -> Verdict:
    """A graph for every batch size."""
    return _buckets(value, context)


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
    parts = [f"cudagraph_capture_sizes: {_buckets(value, context).why}"] if "cudagraph_capture_sizes" in keys else []
    parts += ["cudagraph_mode: every bucket is one static graph in any mode"] if "cudagraph_mode" in keys else []
    parts += [f"{', '.join(rest)}: {topics()['compile'].why}"] if rest else []
    return Verdict(MAPPED if "cudagraph_capture_sizes" in keys else UNNECESSARY, "; ".join(parts) or topics()["compile"].why)
