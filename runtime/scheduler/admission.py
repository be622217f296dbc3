"""Refuses requests that can never be served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...graphs.errors import RequestError
from ...graphs.steps.decode import DECODE
from ...graphs.steps.prefill import PREFILL
from ...graphs.types import Bucket, Limits
from ..request import RECEIVE, SEND, Request, Sampling


def check_kind(request: Request, buckets: Iterable[Bucket]) -> None:
    """Checks that there are buckets for a request.

    Raises:
        RequestError: a server of one kind of bucket is asked for more than its part of a handover.
    """
    kinds = {bucket.kind for bucket in buckets}
    if PREFILL.name not in kinds and request.handover != RECEIVE:
        raise RequestError("this server has no prefill buckets; legal are prompts that a prefill server hands over", code="no_bucket")
    if DECODE.name not in kinds and request.handover != SEND:
        raise RequestError("this server has no decode buckets; legal are prompts for a decode server", code="no_bucket")


def check(request: Request, limits: Limits, vocab_size: int, max_logprobs: int, max_ranked: int = 0, *, scores: bool = False) -> None:
    """Checks that a request can be served.

    Args:
        limits: of the executor.
        vocab_size: V.
        max_logprobs: number of most likely tokens whose log probabilities steps return; 0 if they return none.
        max_ranked: number of most likely tokens that sampling may have to rank; 0 if any number.
        scores: whether there are score steps.

    Raises:
        RequestError: it never can be served.
    """
    most = limits.max_model_len - 1
    if not 1 <= len(request.prompt) <= most:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens; legal is 1 to {most} (max_model_len {most + 1} less one token to generate)",
            param="prompt",
            code="context_length_exceeded" if request.prompt else "invalid_request_error",
        )
    if type(request.max_tokens) is not int or request.max_tokens < 0:
        raise RequestError(f"max_tokens is {request.max_tokens!r}; legal is an integer of at least 0", param="max_tokens")
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("stop_token_ids", tuple(request.stop_token_ids), vocab_size)
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and not max_logprobs:
            raise RequestError(f"{name} is {count!r}; these graphs return none, so legal is null", param=name)
        _check_count(name, count, max_logprobs)
    _check_scoring(request, limits, scores)
    _check_count("speculative_tokens", request.speculative_tokens, limits.drafts)
    _check_restrictions(request, limits, vocab_size)
    if max_ranked:
        _check_ranked(request.sampling, vocab_size, max_ranked)


def _check_scoring(request: Request, limits: Limits, scores: bool) -> None:
    if request.prompt_logprobs is None:
        return
    if not limits.bitmasks and not (scores and not request.handover):
        why = "the tokens of a prompt are scored with bitmasks, and these graphs take none"
        message = f"prompt_logprobs is {request.prompt_logprobs}; {why}; legal is null, or a build with --structured-outputs"
        raise RequestError(message, param="prompt_logprobs")
    first, most = request.prompt_logprobs_from, len(request.prompt)
    if type(first) is not int or not 1 <= first <= most:
        message = f"prompt_logprobs_from is {first!r}; legal is a position from 1 to {most}, the length of the prompt"
        raise RequestError(message, param="prompt_logprobs")


def _check_restrictions(request: Request, limits: Limits, vocab_size: int) -> None:
    sampling = request.sampling
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], vocab_size)
    _check_ids("bad_words", [token for word in sampling.bad_words for token in word], vocab_size)
    if sampling.min_tokens > request.max_tokens:
        message = f"min_tokens is {sampling.min_tokens} and max_tokens is {request.max_tokens}; legal is min_tokens up to that"
        raise RequestError(message, param="min_tokens")
    _check_adjustments(sampling, limits)
    if limits.bitmasks or not request.restricted(0):
        return
    asked = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words, "min_tokens": sampling.min_tokens}
    param = "constraint" if request.constraint is not None else next(name for name, value in asked.items() if value)
    what = "the request constrains its output" if param == "constraint" else f"the request has {param}"
    raise RequestError(f"{what}, and these graphs take no bitmasks; legal is a build with --structured-outputs", param=param)


def _check_adjustments(sampling: Sampling, limits: Limits) -> None:
    neutral = Sampling()
    fields = ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty")
    changed = [name for name in fields if getattr(sampling, name) != getattr(neutral, name)]
    tables = bool(sampling.logit_bias) + sampling.penalises_output
    if changed and limits.logit_adjustments < max(1, tables):
        what = f"{' and '.join(changed)} take {max(1, tables)} adjustments of logits, and these graphs take {limits.logit_adjustments}"
        raise RequestError(f"{what}; legal is a build with --logit-adjustments {max(1, tables)} or more", param=changed[0])


def _check_ranked(sampling: Sampling, vocab_size: int, most: int) -> None:
    """Steps that rank some of the tokens only cannot tell which ones a larger top_k keeps."""
    top_k = sampling.top_k
    if sampling.temperature == 0 or top_k <= most or top_k >= vocab_size:
        return
    why = f"these graphs rank the {most} most likely of {vocab_size} tokens"
    raise RequestError(f"top_k is {top_k}; {why}, so legal is a top_k from 1 to {most}, or none", param="top_k")


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if type(token) is not int or not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{name} has token id {wrong!r}; legal is an integer from 0 to {vocab_size - 1}", param=name)


def _check_count(name: str, value: int | None, most: int) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise RequestError(f"{name} is {value!r}; legal is an integer from 0 to {most}, or null", param=name)
