"""Sampling: logits and random numbers become tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes


class Sample(NamedTuple):
    """Operands of `sample`."""

    logits: Tensor  # [B, Q, V] f32
    temperature: Tensor  # [B] f32; 0 is greedy
    top_k: Tensor  # [B] int32; 0 keeps all
    top_p: Tensor  # [B] f32
    min_p: Tensor  # [B] f32
    uniform: Tensor  # [B, Q] f32 in [0, 1), one random number a token


sample = Primitive("sample", Sample, factors="b q _, b, b, b, b, b q -> b q")


@sample.abstract
def _abstract(args: Sample) -> Tensor:
    return torch.empty(args.uniform.shape, dtype=torch.int32, device=args.logits.device)


@sample.reference
def sample_reference(args: Sample) -> Tensor:
    """Greedy where temperature is 0, else by inverting the distribution function, in id order, of the kept tokens.

    Divide by temperature; keep the top_k largest; of their renormalised probabilities keep the smallest
    leading set that reaches top_p; and keep what is at least min_p times as likely as the most likely. Ties: lower id first.

    Returns:
        [B, Q] int32.
    """
    logits, temperature, top_k, top_p, min_p, uniform = args
    tokens = logits.argmax(-1).to(torch.int32)
    rows = torch.nonzero(temperature > 0).squeeze(-1)
    if rows.numel():
        drawn = logits[rows]
        # Relative to the largest, so that no temperature, however small, turns a logit into infinity.
        heat = (drawn - drawn.amax(-1, keepdim=True)) / temperature[rows, None, None]
        weights = _kept_weights(heat, top_k[rows], top_p[rows], min_p[rows])
        tokens[rows] = _invert(weights, uniform[rows])
    return tokens


def _kept_weights(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities [R, Q, V], zero where dropped; sorts only when some row asks for a rank."""
    weights = torch.softmax(logits, -1)
    allowed = weights >= min_p[:, None, None] * weights.amax(-1, keepdim=True)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        ranked, order = torch.sort(weights, dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        within = (rank < top_k[:, None, None]) | (top_k[:, None, None] <= 0)
        share = torch.where(within, ranked, 0.0)
        share = share / share.sum(-1, keepdim=True)
        within = within & ((share.cumsum(-1) - share < top_p[:, None, None]) | (top_p[:, None, None] >= 1))
        allowed = allowed & torch.zeros_like(within).scatter(-1, order, within)
    return torch.where(allowed, weights, 0.0)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """First id whose cumulated weight exceeds `uniform` of the whole; never one of weight zero."""
    mass = weights.double().cumsum(-1)
    picked = (mass <= uniform.double()[..., None] * mass[..., -1:]).sum(-1)
    # Where rounding leaves the last sum below its target, the last kept id closes the distribution.
    ids = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, ids, 0).amax(-1)
    return torch.minimum(picked, last).to(torch.int32)


_greedy_or_drawn = Native("npuc_sample", sample.schema, sample.rule("abstract")).op


@sample.lowering("inductor")
def _cpu(args: Sample) -> Any:
    """A kernel that looks at the temperatures (lowering/cpp/sample.cpp): greedy steps, known by value only, need no sort."""
    return _greedy_or_drawn(*args)


@sample.lowering("npu")
def _npu(args: Sample) -> Any:
    """Every row is computed both ways, greedy and drawn, and its temperature picks one.

    Probabilities are summed in f32, because the device has no f64: a draw within rounding of the border between two tokens
    may take the other one.
    """
    logits, temperature, top_k, top_p, min_p, uniform = args
    hot = temperature > 0
    heat = torch.where(hot, temperature, 1.0)[:, None, None]
    weights = torch.softmax((logits - logits.max(-1, keepdim=True)[0]) / heat, -1)
    allowed = weights >= min_p[:, None, None] * weights.max(-1, keepdim=True)[0]
    allowed = allowed & _leading(weights, top_k[:, None, None], top_p[:, None, None])
    weights = torch.where(allowed, weights, 0.0)
    mass = weights.cumsum(-1)
    picked = (mass <= uniform[..., None] * mass[..., -1:]).to(torch.int32).sum(-1, dtype=torch.int32)
    # The maximum is taken in f32, which holds every id of a vocabulary, since the device has none of integers.
    ids = torch.arange(logits.shape[-1], dtype=torch.float32, device=logits.device)
    last = torch.where(weights > 0, ids, 0.0).max(-1)[0].to(torch.int32)
    return torch.where(hot[:, None], torch.minimum(picked, last), logits.argmax(-1).to(torch.int32))


def _leading(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which of weights [B, Q, V] top_k and top_p [B, 1, 1] keep.

    They keep the n largest. The device's sort promises no order among equals, so the smallest kept weight is looked up instead
    of the kept ids, and of those that equal it the lower ids come first.
    """
    ranked = torch.sort(weights, dim=-1, descending=True)[0]
    rank = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    within = (rank < top_k) | (top_k <= 0)
    share = torch.where(within, ranked, 0.0)
    share = share / share.sum(-1, keepdim=True)
    within = within & ((share.cumsum(-1) - share < top_p) | (top_p >= 1))
    count = within.to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)
    least = ranked.gather(-1, (count - 1).clamp(min=0).to(torch.int64))
    above, equal = weights > least, weights == least
    room = count - above.to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.to(torch.int32).cumsum(-1, dtype=torch.int32) <= room))


@sample.cost
def _cost(args: Sample) -> Cost:
    logits = args.logits
    passes = max(1, (logits.shape[-1] - 1).bit_length()) + 12
    return Cost(passes * logits.numel(), nbytes(*args), args.uniform.numel() * 4)
