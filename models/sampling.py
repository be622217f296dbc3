"""Sampling from logits, wherever the vocabulary lies: tokens of a step, their log probabilities, and the argmax that drafts take."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..graphs import ops
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import all_gather, all_to_all, axis_index, shard_map
from ..graphs.types import Tree

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
ADJUSTING = ("adjustments", "bias_rows", "penalty_rows", "seen", "seen_rows", "repetition_penalty")
LOGPROBS = ("chosen_logprobs", "top_ids", "top_logprobs")


def sample_tokens(
    logits: torch.Tensor, inputs: Tree, uniform: torch.Tensor, *, emit_logits: bool, max_logprobs: int, vocab_size: int | None = None
) -> dict[str, Any]:
    """Samples W tokens per row.

    Args:
        logits: [B*W, V or more], split over the vocabulary where the layout splits it.
        inputs: with the sampling parameters [B], and where there are bitmasks or adjustments of logits with these and whose they are.
        uniform: [B, W] random numbers.
        emit_logits: logits are among the results; without them no device ever holds those of the whole vocabulary for all rows.
        max_logprobs: n, for how many of the most likely tokens log probabilities are returned; with 0 none are.
        vocab_size: V, where logits beyond it are of padding: they are cut off before anything reads them. None: all are of tokens.

    Returns:
        `tokens` [B, W] i32; with n also `chosen_logprobs` [B, W] f32, `top_ids` [B, W, n] i32, `top_logprobs` [B, W, n] f32; and
        with emit_logits `logits` [B, W, V] f32.
    """
    B, W = uniform.shape
    logits, rows = _whole(logits, B, emit_logits, vocab_size)
    logits = logits.view(B, W, -1).float()
    sampling = [constrain(inputs[name], rows) for name in SAMPLING]
    tokens = ops.sample(_masked(logits, inputs, rows), *sampling, constrain(uniform, rows, None))
    if not max_logprobs:
        return {"tokens": constrain(tokens, None, None)} | ({"logits": logits} if emit_logits else {})
    logprobs = ops.token_logprobs(logits, tokens, constrain(inputs["logprobs"], rows), max_logprobs)
    if rows and num_shards(rows) > 1:
        tokens, logprobs = _replicated(tokens, *logprobs)
    return {"tokens": tokens, **dict(zip(LOGPROBS, logprobs, strict=True))} | ({"logits": logits} if emit_logits else {})


def score_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    asked: torch.Tensor,
    earlier: torch.Tensor,
    *,
    emit_logits: bool,
    max_logprobs: int,
    vocab_size: int,
) -> dict[str, Any]:
    """The same, but for what is sampled, of Q tokens per row that are known.

    Args:
        logits: [B*Q, V or more] before each token.
        tokens: [B, Q] i32.
        asked: [B] i32, 1 where a row wants log probabilities.
        earlier: [B, N], before which nothing is exchanged.
    """
    B, Q = tokens.shape
    if num_shards("vocab") > 1:
        logits = shard_map(ops.behind, [(logits, (None, "vocab")), (earlier, (None, None))], (None, "vocab"))
    logits, rows = _whole(logits, B * Q, emit_logits, vocab_size)
    logits = logits.view(B * Q, 1, -1).float()
    each = constrain(tokens.reshape(-1, 1), rows, None), constrain(asked[:, None].expand(-1, Q).reshape(-1), rows)
    logprobs = ops.token_logprobs(logits, *each, max_logprobs)
    if rows and num_shards(rows) > 1:
        _, logprobs = _replicated(each[0], *logprobs)
    scored = {name: value.view(B, Q, *value.shape[2:]) for name, value in zip(LOGPROBS, logprobs, strict=True)}
    return {"tokens": tokens, **scored} | ({"logits": logits.view(B, Q, -1)} if emit_logits else {})


def _whole(logits: torch.Tensor, B: int, emit_logits: bool, vocab_size: int | None) -> tuple[torch.Tensor, str | None]:
    """Logits of the whole vocabulary, and the axis by which their rows are shared: of B requests, or None where each device has all."""
    by_rows = not emit_logits and B % num_shards("vocab") == 0
    rows = "sampled_rows" if by_rows else None
    if by_rows:
        # Each device gets all logits of its share of the requests. That moves as many bytes as one device holds; gathering the
        # vocabulary on every device would move as many as all devices hold.
        logits = shard_map(lambda x: all_to_all(x, "vocab"), [(logits, (None, "vocab"))], (rows, None))
    return _cut(constrain(logits, rows, None), vocab_size), rows


def _masked(logits: torch.Tensor, inputs: Tree, rows: str | None) -> torch.Tensor:
    """What tokens are sampled from: adjusted, and without those that a row's bitmask forbids, where the graph takes these inputs.

    Masks come last, which keeps what is masked at the lowest finite number.
    """
    if "adjustments" in inputs:
        own = {name: constrain(inputs[name], rows) for name in ("bias_rows", "penalty_rows", "seen_rows", "repetition_penalty")}
        shared = {name: inputs[name] for name in ("adjustments", "seen")}
        logits = ops.adjust_logits(logits, *((own | shared)[name] for name in ADJUSTING))
    if "bitmask" not in inputs:
        return logits
    masked: torch.Tensor = ops.mask_logits(logits, inputs["bitmask"], constrain(inputs["bitmask_rows"], rows))
    return masked


def _replicated(
    tokens: torch.Tensor, chosen: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Tokens and log probabilities of all rows on every device, from those of each device's rows.

    One all-gather of a packed tensor; four separate gathers would cost four latencies.
    """
    n = values.shape[-1]
    # A float32 holds every id of a vocabulary.
    packed = constrain(torch.cat([tokens[..., None].float(), chosen[..., None], ids.float(), values], -1), None, None, None)
    token, chosen, ids, values = packed.split([1, 1, n, n], -1)
    return token.to(torch.int32).view(tokens.shape), (chosen.reshape(tokens.shape), ids.to(torch.int32), values.contiguous())


def _cut(logits: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """Without the logits of padding: [T, V or more] -> [T, V]."""
    return logits if vocab_size in (None, logits.shape[-1]) else logits[:, :vocab_size].contiguous()


def best(logits: torch.Tensor, vocab_size: int | None = None) -> torch.Tensor:
    """The most likely tokens, of equals the lowest id: [B, V or more] -> [B] i32; `vocab_size` as of `sample_tokens`."""
    if num_shards("vocab") == 1:
        return _cut(constrain(logits, None, None), vocab_size).float().argmax(-1).to(torch.int32)
    if vocab_size in (None, logits.shape[-1]):
        return shard_map(_best_of_shards, [(logits, (None, "vocab"))], (None,))

    def without_padding(logits: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(logits.shape[-1], device=logits.device) + axis_index("vocab") * logits.shape[-1]
        lowest = torch.full((), -math.inf, dtype=logits.dtype, device=logits.device)
        return _best_of_shards(torch.where(ids < vocab_size, logits, lowest))

    return shard_map(without_padding, [(logits, (None, "vocab"))], (None,))


def _best_of_shards(logits: torch.Tensor) -> torch.Tensor:
    """Every device gathers each shard's largest logit and its id there, 8 bytes a row and device; a float32 holds every id of a vocabulary.

    The largest is found in the dtype of the logits, where it is the same as in float32.
    """
    count, size = num_shards("vocab"), logits.shape[-1]
    value, index = logits.max(-1, keepdim=True)
    shards = all_gather(torch.cat([value.float(), index.float()], -1), "vocab").view(count, -1, 2)
    value, token = shards.split(1, -1)
    first = torch.arange(0, count * size, size, dtype=torch.float32, device=logits.device)
    winner = value.view(count, -1).argmax(0)
    tokens: torch.Tensor = (token.view(count, -1) + first[:, None]).gather(0, winner[None]).view(-1).to(torch.int32)
    return tokens
