"""Sizes of small models that a mesh splits as it splits the large ones they stand for.

A device has two heads and experts of each kind where the large model has several, so that mixing them up changes the result, and one
where it has one. Widths are multiples of 8, as packed int4 matrices need.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..graphs.ops.sample import part_length
from ..graphs.steps.inputs import MAX_RANKED
from ..graphs.types import WORD_BITS
from . import head_padding
from .rotary import Rotary

HIDDEN, HEAD, EXPERT_FFN = 64, 16, 32
"""`hidden_size`, `head_dim` and `moe_intermediate_size`, which no mesh splits."""

MIN_LAYERS, MAX_LAYERS = 4, 8
MAX_CHOICES = 4

WIDTHS: Mapping[str, int] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 64,
    "num_local_experts": 64,
    "max_position_embeddings": 4096,
}
"""Most that a narrow model has of fields of config.json that every family may have: sizes that no mesh divides, or that every legal mesh
divides. Numbers of heads, which a mesh divides, stay."""


def vocabulary(size: int, tp: int) -> int:
    """Tokens of a small vocabulary that graphs treat as the large one.

    Sampling has other operators where graphs rank all tokens, where a draw reads the vocabulary in one part, where ranks do not share
    the vocabulary evenly, and where the last word of a bitmask has bits beyond it.
    """
    least = tp * max(8, 256 // tp) if size <= MAX_RANKED else MAX_RANKED + 1

    def alike(count: int) -> bool:
        share = -(-count // tp)
        divided = all((count % n == 0) == (size % n == 0) for n in (tp, WORD_BITS))
        return divided and share * (tp - 1) < count and (size < least or _in_parts(count) == _in_parts(size))

    return next(count for count in itertools.count(least) if alike(count))


def _in_parts(size: int) -> bool:
    """Whether a draw sums up a vocabulary in several parts of several tokens."""
    return part_length(size) not in (1, size)


def attention_heads(queries: int, keys: int, copies: int, tp: int) -> tuple[int, int]:
    """Query heads and key-value heads; a device has some of each key-value head's `copies`.

    Where those of the large model are padded (head_padding.py), so are these: by one key-value head, or one query head of each.
    """
    groups, each = tp // copies, -(-queries // (keys * copies))
    small = groups * min(2, max(1, keys // tp))
    if keys % groups:
        small = next(count for count in (groups - 1, 2 * groups - 1) if count and head_padding.copies(count, tp) == copies)
    per = copies * min(2, each)
    return small * (per if queries // keys % copies == 0 else max(1, per - 1)), small


def heads(cfg: Any, tp: int) -> dict[str, Any]:
    """Fields of a small configuration whose attention is grouped: of its heads, and of their rotation."""
    queries, keys = attention_heads(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.variant.kv_repeat, tp)
    small = rotary(cfg.rotary, cfg.head_dim)
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": HEAD, "rotary": small}


def rotary(large: Rotary, head_dim: int) -> Rotary:
    """That of heads of HEAD dimensions, of which as large a share is rotated."""
    return replace(large, dim=max(2, round(HEAD * large.dim / head_dim) // 2 * 2))


def split(heads: int, tp: int) -> int:
    """Heads of another kind, which `tp` divides, or of which it leaves one over where it does not divide those of the large model."""
    return tp * min(2, heads // tp) if heads % tp == 0 else 2 * tp - 1


def ffn(tp: int) -> int:
    """Channels of a feed-forward that is split over a group."""
    return 8 * max(4, tp)


def experts(count: int, ranks: int) -> int:
    """Experts, spread over so many ranks."""
    return ranks * min(2, count // ranks) if ranks > 1 else min(8, count)


def choices(per_token: int, small_experts: int) -> int:
    """Experts per token (top-k) of the shrunken model: below its number of experts; 0 for a dense model."""
    return min(per_token, MAX_CHOICES, max(1, small_experts // 2)) if small_experts else 0


def feed_forwards(cfg: Any, tp: int, ranks: int) -> dict[str, Any]:
    """Fields of a small configuration that every family has: of its vocabulary, its width, its feed-forwards and its experts."""
    count = experts(cfg.num_experts, ranks)
    return {
        "vocab_size": vocabulary(cfg.vocab_size, tp),
        "hidden_size": HIDDEN,
        "intermediate_size": ffn(tp) if cfg.intermediate_size else 0,
        "num_experts": count,
        "num_experts_per_tok": choices(cfg.num_experts_per_tok, count),
        "moe_intermediate_size": EXPERT_FFN if cfg.moe_intermediate_size else 0,
    }


def layers(kinds: Sequence[str]) -> int:
    """Layers of the first whole periods of a pattern of kinds, at least four; of a period longer than eight the first eight."""
    each = period(kinds)
    return min(each * -(-MIN_LAYERS // each), len(kinds), MAX_LAYERS)


def runs(kinds: Sequence[str]) -> tuple[str, ...]:
    """Of layers whose kinds come in runs the first of each run, and two of the last: all kinds, in their order, and two layers alike.

    Of many runs, as of kinds that alternate behind the first run, those until all kinds were there, and the last layer.
    """
    firsts = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    if len(firsts) >= MAX_LAYERS:
        firsts = firsts[: 1 + max(map(firsts.index, firsts))]
    return (*firsts, kinds[-1])[: len(kinds)]


def period(kinds: Sequence[str]) -> int:
    """Number of layers after which the kinds repeat."""
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
