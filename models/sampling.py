"""Turns hidden states into tokens: the model's logits, sampled or the best one, wherever the vocabulary lies."""

from __future__ import annotations

from typing import Any

import torch

from ..graphs import ops
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import all_gather, all_to_all, axis_index, shard_map
from ..graphs.types import Tree

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
LOGPROBS = ("chosen_logprobs", "top_ids", "top_logprobs")


def speak(logits: torch.Tensor, inputs: Tree, uniform: torch.Tensor, *, emit_logits: bool, max_logprobs: int) -> dict[str, Any]:
    """Samples.

    Args:
        logits: [B*W, V], split over the vocabulary where the layout splits it.
        inputs: with the sampling parameters [B].
        uniform: [B, W] random numbers.
        emit_logits: logits are among the results; without them no device ever holds those of the whole vocabulary for all rows.
        max_logprobs: n, of how many most likely tokens the log probabilities are told; 0 tells none.

    Returns:
        `tokens` [B, W] i32; with n also `chosen_logprobs` [B, W] f32, `top_ids` [B, W, n] i32, `top_logprobs` [B, W, n] f32; and
        `logits` [B, W, V] f32.
    """
    B, W = uniform.shape
    shared = not emit_logits and B % num_shards("vocab") == 0
    rows = "sampled_rows" if shared else None
    if shared:
        # Each device gets all logits of its share of the requests. That moves as many bytes as a device holds; gathering the
        # vocabulary on every device would move as many as all hold.
        logits = shard_map(lambda x: all_to_all(x, "vocab"), [(logits, (None, "vocab"))], (rows, None))
    logits = constrain(logits, rows, None).view(B, W, -1).float()
    knobs = [constrain(inputs[name], rows) for name in SAMPLING]
    tokens = ops.sample(logits, *knobs, constrain(uniform, rows, None))
    if not max_logprobs:
        return {"tokens": constrain(tokens, None, None)} | ({"logits": logits} if emit_logits else {})
    told = ops.token_logprobs(logits, tokens, constrain(inputs["logprobs"], rows), max_logprobs)
    if rows and num_shards(rows) > 1:
        tokens, told = _everywhere(tokens, *told)
    return {"tokens": tokens, **dict(zip(LOGPROBS, told, strict=True))} | ({"logits": logits} if emit_logits else {})


def _everywhere(
    tokens: torch.Tensor, chosen: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What each device found of its rows, on all devices, by one exchange: four would wait four times, and for nothing to come first."""
    n = values.shape[-1]
    packed = constrain(torch.cat([tokens[..., None].float(), chosen[..., None], ids.float(), values], -1), None, None, None)
    token, chosen, ids, values = packed.split([1, 1, n, n], -1)
    # A float32 holds every id of a vocabulary.
    return token.to(torch.int32).view(tokens.shape), (chosen.reshape(tokens.shape), ids.to(torch.int32), values.contiguous())


def best(logits: torch.Tensor) -> torch.Tensor:
    """The most likely tokens, of equals the lowest id: [B, V] -> [B] i32."""
    if num_shards("vocab") == 1:
        return constrain(logits, None, None).float().argmax(-1).to(torch.int32)
    return shard_map(_best_of_shards, [(logits, (None, "vocab"))], (None,))


def _best_of_shards(logits: torch.Tensor) -> torch.Tensor:
    """Each device finds its best one, all compare: 8 bytes a row and device. A float32 holds every id of a vocabulary."""
    value, at = logits.float().max(-1, keepdim=True)
    index = (at.to(torch.int32) + axis_index("vocab") * logits.shape[-1]).float()
    every = all_gather(torch.cat([value, index], -1), "vocab").view(num_shards("vocab"), -1, 2)
    winner = every[:, :, 0].argmax(0)
    return every[:, :, 1].gather(0, winner[None]).view(-1).to(torch.int32)
