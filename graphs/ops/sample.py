"""Sampling: logits and random numbers become tokens."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..steps.inputs import MAX_RANKED, NON_FINITE, UNDECIDED

_TINY = torch.finfo(torch.float32).tiny
# So far below 1 that the product with any normal number is less than that number.
_BELOW_1 = 1 - 2.0**-23


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
        [B, Q] int32; `NON_FINITE` where a logit is NaN or the largest one infinite.
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
    return torch.where(logits.amax(-1).isfinite(), tokens, NON_FINITE)


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
def _npu(args: Sample) -> Tensor:
    """Every row by one static sequence of operators; greedy rows keep one token. Nothing longer than `MAX_RANKED` values is ranked.

    Weights are exp((logit - largest) / temperature). A row keeps those above a border, and of those that equal it the first few by id.
    Rows with top_k or top_p find the border among their most likely tokens; the border of the others is min_p. Sums are in f32, because
    the device has no f64: a draw within rounding of the border between two tokens may take the other one.

    Returns:
        [B, Q] int32; `UNDECIDED` where top_p keeps more tokens than are ranked, and `NON_FINITE` as the reference.
    """
    logits, temperature, top_k, top_p, min_p, uniform = args
    # The smallest normal temperature leaves weight to the largest logit and its equals only, which is what greedy rows need.
    heat = temperature.clamp(min=_TINY)[:, None, None]
    weights = ((logits - logits.amax(-1, keepdim=True)) / heat).exp()
    # Greedy rows keep the first of the largest.
    most = torch.where(temperature > 0, torch.where(top_k > 0, top_k, logits.shape[-1]), 1)
    least, room, undecided = _border(weights, most, top_p, min_p[:, None, None])
    tokens = _draw(weights, least, room, uniform)
    if undecided is not None:
        tokens = torch.where(undecided, UNDECIDED, tokens)
    # NaN is a weight of exactly these rows: where a logit is, and as the difference of two infinite ones. A sum shows it, whatever a
    # maximum makes of it.
    whole = weights.sum(-1, keepdim=True)
    return torch.where((whole != whole).squeeze(-1), NON_FINITE, tokens)


def _border(weights: Tensor, most: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The smallest weight that a row keeps, how many of its equals, and where it may be smaller than what is ranked.

    Args:
        weights: [B, Q, V], the largest of each row is 1.
        most: [B] int32, how many tokens are kept at most.
        min_p: [B, 1, 1].

    Returns:
        [B, Q, 1] f32 each, the second V where all equals are kept; and [B, Q] bool, or None where the whole vocabulary is ranked.
    """
    V = weights.shape[-1]
    ranked = weights.topk(min(MAX_RANKED, V), dim=-1)[0]
    rank = torch.arange(ranked.shape[-1], dtype=torch.int32, device=weights.device)
    within, cut = rank < most[:, None, None], top_p < 1
    share = torch.where(within, ranked, 0.0)
    mass = share.cumsum(-1)
    # At top_p 1 all is kept, also what rounding hides in the sum.
    everything = (most >= V)[:, None, None]
    whole = mass[..., -1:] if len(rank) == V else torch.where(everything, weights.sum(-1, keepdim=True), mass[..., -1:])
    target = torch.where(cut, top_p, 2.0)[:, None, None] * whole
    kept = within & (mass - share < target) & (ranked >= min_p)
    undecided = None
    if len(rank) < V:
        # The last ranked token is kept, and those after it may be as well.
        undecided = (kept[..., -1:] & (mass[..., -1:] < target) & (everything & cut[:, None, None])).squeeze(-1)
    ranked = torch.where(kept, ranked, math.inf)
    least = ranked.amin(-1, keepdim=True)
    equals = (ranked == least).to(torch.float32).sum(-1, keepdim=True)
    limited = ((most < V) | cut)[:, None, None]
    return torch.where(limited, least, min_p), torch.where(limited, equals, float(V)), undecided


def _draw(weights: Tensor, least: Tensor, room: Tensor, uniform: Tensor) -> Tensor:
    """Inverts the distribution function of the kept weights [B, Q, V], first over parts of the vocabulary, then within one: [B, Q] int32.

    Running sums over a whole vocabulary are slow on the device, and these read it in two sums.
    """
    (B, Q, V), device = weights.shape, weights.device
    rows, length = B * Q, part_length(V)
    parts, least, room = weights.view(rows, -1, length), least.view(rows, 1), room.view(rows, 1)
    above = torch.where(parts > least[:, :, None], parts, 0.0).sum(-1)
    equals = (parts == least[:, :, None]).to(torch.float32).sum(-1)
    # How many equals of the border may still be kept when the sum gets to a part.
    left = room + equals - equals.cumsum(-1)
    mass = (above + least * torch.minimum(equals, left).clamp(min=0)).cumsum(-1)
    target = (uniform * _BELOW_1).view(rows, 1) * mass[:, -1:]
    passed = mass <= target
    # Of NaN a device may say anything; a part and a place in it are numbers of theirs all the same.
    part = passed.to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32).clamp(max=parts.shape[1] - 1)
    target = target - torch.where(passed, mass, 0.0).amax(-1, keepdim=True)
    first = torch.arange(rows, dtype=torch.int32, device=device)[:, None] * parts.shape[1]
    inside = parts.view(-1, length).index_select(0, (part + first).view(rows))
    equal = inside == least
    kept = (inside > least) | (equal & (equal.to(torch.float32).cumsum(-1) <= left.gather(1, part.to(torch.int64))))
    mass = torch.where(kept, inside, 0.0).cumsum(-1)
    # The sum of the part may have been rounded up above what its running sum reaches.
    passed = mass <= torch.minimum(target, mass[:, -1:] * _BELOW_1)
    place = passed.to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32).clamp(max=length - 1)
    return (part * length + place).view(B, Q)


def part_length(vocab_size: int) -> int:
    """Length of the equal parts of a vocabulary that make the two sums of a draw shortest; of whole blocks of 32 bytes where that is no
    more than twice as long."""
    lengths = [length for length in range(1, vocab_size + 1) if vocab_size % length == 0]
    return min(lengths, key=lambda length: (length + vocab_size // length) * (1 if length % 8 == 0 else 2))


@sample.cost
def _cost(args: Sample) -> Cost:
    logits = args.logits
    passes = max(1, (logits.shape[-1] - 1).bit_length()) + 12
    return Cost(passes * logits.numel(), nbytes(*args), args.uniform.numel() * 4)
