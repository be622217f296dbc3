"""Every primitive of the table passes the same tests: shapes, lowerings, donation, cost, gradients, shards, poison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from support.draws import Draw, ints, poison
from torch.distributed.tensor import Placement

from npucompile.graphs import ops
from npucompile.graphs.ops.packed_latents import packed_width
from npucompile.graphs.primitive import TABLE, Cost, Primitive, nbytes
from npucompile.graphs.quantise import pack_w4, quantise_rows, quantise_w4, quantise_w4_values, quantise_w8
from npucompile.graphs.spmd.sharding import strategies
from npucompile.graphs.steps.inputs import NON_FINITE

# Lowerings for this machine call native kernels.
pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = (torch.float32, torch.bfloat16)
# Tolerances for values near 1. bf16 keeps 8 bits, and a lowering may round once more, or once less, than the reference.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def conv(r: Draw, B: int, Q: int, C: int, taps: int, write: torch.Tensor, ahead: int = 0) -> tuple[Any, ...]:
    num_computed_tokens, query_lens = ints(*[0, 3, 5][:B]), ints(*[Q, Q, Q - 1][:B])
    return r(B, Q, C), r(C, taps), r(9, taps - 1 + ahead, C), ints(*[1, 2, 3][:B]), write, num_computed_tokens, query_lens, r.dtype


def delta(r: Draw, B: int, Q: int, write: torch.Tensor, query_lens: torch.Tensor) -> tuple[Any, ...]:
    q, k, v = r.unit(B, Q, 2, 3), r.unit(B, Q, 2, 3), r(B, Q, 4, 5)
    g, beta = -r.uniform(B, Q, 4), r.uniform(B, Q, 4).to(r.dtype)
    return q, k, v, g, beta, r.f32(9, 4, 5, 3), ints(*[1, 2][:B]), write, ints(*[4, 0][:B]), query_lens


def chunked(r: Draw, B: int, Q: int, write: torch.Tensor, query_lens: torch.Tensor, chunk: int) -> tuple[Any, ...]:
    tokens = r.f32(B, Q, 2, 16), r(B, Q, 2, 4), r.f32(4), r.f32(4)
    return *tokens, r.f32(9, 4, 5, 3), ints(*[1, 2][:B]), write, ints(*[4, 0][:B]), query_lens, 1e-6, chunk


def experts(r: Draw, T: int, M: int, E: int, F: int) -> tuple[Any, ...]:
    return r(T, M), r.uniform(T, 2).to(r.dtype), r.below(E, T, 2), r(E, 2, F, M), r(E, M, F)


def elsewhere(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with some experts on other ranks, numbered before and after the local ones."""
    x, weights, ids, *rest = operands
    ids = ids.clone()
    ids[0, 0], ids[-1, 1], ids[1] = -1, rest[0].shape[0], 1000
    return x, weights, ids, *rest


def grouped_weights(r: Draw, E: int, M: int, F: int) -> tuple[torch.Tensor, torch.Tensor]:
    return r(E, M, 2 * F), r(E, F, M)


def quantised(r: Draw, counts: tuple[int, ...], M: int, F: int, quantise: Callable[..., Any]) -> tuple[Any, ...]:
    """Operands of the experts' products over 7 rows."""
    weights = [part for weight in grouped_weights(r, len(counts), M, F) for part in quantise(weight)]
    return *quantise_rows(r(7, M)), torch.tensor(counts), *weights, r.dtype


def weight_quantised(r: Draw, counts: tuple[int, ...], M: int, F: int, group: int = 0) -> tuple[Any, ...]:
    """As `quantised`, over floats."""
    weights = [part for weight in grouped_weights(r, len(counts), M, F) for part in packed(weight, group)]
    return r(7, M), torch.tensor(counts), *weights


def static(r: Draw, T: int, K: int, N: int) -> tuple[Any, ...]:
    """Operands of a product of activations that are rounded by one scale, some beyond the range of int8."""
    integers, scale = quantise_w8(r(K, N))
    offset = torch.tensor([5.0])
    return r(T, K), integers, scale * 0.02, -5 * integers.sum(0, dtype=torch.int32) + 3, torch.tensor([0.02]), offset


def distinct(*rows: tuple[int, ...]) -> torch.Tensor:
    """Choices that name no expert twice in a row, those of the last row the largest: its rows are last when sorted."""
    assert all(len(set(row)) == len(row) for row in rows)
    return ints(*(list(row) for row in rows))


def dispatched(r: Draw) -> tuple[Any, ...]:
    """Operands of a combine in a group of one rank."""
    ids = distinct((0, 3), (3, 1), (5, 4))
    _, _, _, assist, received = ops.moe_dispatch(r(3, 5), ids, r(3, 5), ints(0), 6, "world", 1, False)
    return r(6, 5), ids, r.uniform(3, 2), assist, received, r(3, 5), ints(0), 6, "world", 1, r(6, 5).to(torch.int8), False


def fused_experts(r: Draw, M: int, F: int) -> tuple[Any, ...]:
    """Operands of fused experts in a group of one rank."""
    weights = [part for weight in grouped_weights(r, 6, M, F) for part in quantise_w4(weight)]
    x = r(3, M)
    return x, distinct((0, 3), (3, 1), (5, 4)), r.uniform(3, 2), x, *weights, ints(0), 6, "world", 1


def rotation(r: Draw, T: int, H: int, D: int, width: int) -> tuple[Any, ...]:
    return r(T, H, D), *ops.rope_angles(r.below(100, T), width, 1e4)


def heads(r: Draw, T: int, G: int, P: int, D: int, width: int) -> tuple[Any, ...]:
    return r(T, G, (2 * P + 2) * D), r(D), r(D), *ops.rope_angles(r.below(100, T), width, 1e4), 1e-6


def attention(r: Draw) -> tuple[Any, ...]:
    table = ints([4, 2, 1], [3, 0, 0])
    return r(2, 3, 4, 5), r(6, 4, 2, 5), r(6, 4, 2, 5), table, ints(7, 0), ints(3, 2), 5**-0.5


def segments(r: Draw) -> tuple[Any, ...]:
    """Four segments, of which the last has nothing."""
    return *(r(4, 5, 2, 7) for _ in range(3)), ints(5, 1, 3, 0), 7**-0.5


def rounded_pools(r: Draw, static: bool, T: int = 3, G: int = 1) -> tuple[Any, ...]:
    """Pools of int8 of three pages of five, their scales, and new rows."""
    pools = [(r.below(255, 3, 5, G, 6) - 127).to(torch.int8) for _ in range(2)]
    rows, slots = (r(T, G, 6), r(T, G, 6)), torch.tensor([7, 0, 13, 4][:T], dtype=torch.int32)
    if static:
        return (*pools, *rows, r.uniform(G, 6) + 0.01, r.uniform(G, 6) + 0.01, slots)
    return (*pools, r.uniform(3, G, 5), r.uniform(3, G, 5), *rows, slots)


def rounded_attention(r: Draw, static: bool) -> tuple[Any, ...]:
    """As `attention`, over int8."""
    q, k, _, *place = attention(r)
    pools = [(r.below(255, *k.shape) - 127).to(torch.int8) for _ in range(2)]
    return (q, *pools, *(r.uniform(*((2, 5) if static else (6, 2, 4))) / 64 for _ in range(2)), *place)


def packed(weight: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [K, N] in int4 and its scales."""
    values, scale = quantise_w4_values(weight, group)
    return pack_w4(values), scale


def latent_attention(r: Draw) -> tuple[Any, ...]:
    table = ints([4, 2, 1], [3, 0, 0])
    return r(2, 3, 4, 5), r(2, 3, 4, 2), r(6, 4, 1, 5), r(6, 4, 1, 2), table, ints(7, 0), ints(3, 2), 7**-0.5


def indexing(r: Draw) -> tuple[Any, ...]:
    """Row 0 chooses six of up to ten keys, row 1 sees fewer than that."""
    return r(2, 3, 4, 5), r(2, 3, 4), r(6, 4, 1, 5), ints([4, 2, 1], [3, 0, 0]), ints(7, 0), ints(3, 2), 6


def sparse(r: Draw) -> tuple[Any, ...]:
    """As `latent_attention`; each query has some of the keys that it sees, in any order."""
    q, q_rope, cache, rope_cache, *place = latent_attention(r)
    chosen = [[[7, 0, 3], [1, 8, -1], [9, 2, 5]], [[0, -1, -1], [1, 0, -1], [2, -1, -1]]]
    return q, q_rope, cache, rope_cache, ints(*chosen), *place


def rounded_indexing(r: Draw) -> tuple[Any, ...]:
    """As `indexing`, over keys of int8."""
    q, weights, keys, *place = indexing(r)
    return q, weights, (r.below(255, *keys.shape) - 127).to(torch.int8), r.uniform(6, 4, 1).half() / 64, *place


def packed_pool(r: Draw, channels: int, rotary: int, pages: int = 6) -> torch.Tensor:
    """A pool of four tokens a page, each of which was written."""
    empty = torch.zeros(pages, 4, 1, packed_width(channels, rotary, r.dtype), dtype=torch.int8)
    return ops.packed_latent_write(empty, r(4 * pages, 1, channels), r(4 * pages, 1, rotary), torch.arange(4 * pages))


def packed_writing(r: Draw, channels: int, rotary: int) -> tuple[Any, ...]:
    return packed_pool(r, channels, rotary, 3), r(3, 1, channels), r(3, 1, rotary), ints(7, 0, 10)


def packed_sparse(r: Draw) -> tuple[Any, ...]:
    """As `sparse`, over packed rows."""
    q, q_rope, _, _, *rest = sparse(r)
    return q, q_rope, packed_pool(r, 5, 2), *rest


def sampling(r: Draw, B: int, Q: int, V: int) -> tuple[Any, ...]:
    knobs = torch.tensor([[0.0, 1.0, 0.7, 1.3], [0, 3, 0, 2], [1.0, 0.8, 0.5, 1.0], [0.0, 0.0, 0.1, 0.3]])[:, :B]
    return r.f32(B, Q, V), knobs[0], knobs[1].int(), knobs[2], knobs[3], r.uniform(B, Q)


def masking(r: Draw, B: int, Q: int, V: int) -> tuple[Any, ...]:
    """Row 0 has the second bitmask, row 1 none, row 2 the first."""
    words = torch.randint(-(2**31), 2**31, (2, Q, -(-V // 32)), generator=r.generator, dtype=torch.int64).to(torch.int32)
    return r.f32(B, Q, V), words, ints(*[2, 0, 1][:B])


def adjusting(r: Draw, B: int, Q: int, V: int) -> tuple[Any, ...]:
    """Row 0 has the second adjustment first and the first last, row 1 none, row 2 another two and no tokens seen."""
    seen = torch.randint(-(2**31), 2**31, (3, Q, -(-V // 32)), generator=r.generator, dtype=torch.int64).to(torch.int32)
    rows = [ints(*numbers[:B]) for numbers in ([2, 0, 3], [1, 0, 2], [2, 0, 0])]
    return r.f32(B, Q, V), r.f32(3, Q, V), *rows[:2], seen, rows[2], torch.tensor([1.7, 1.0, 1.0])[:B]


def accepting(r: Draw, *query_lens: int) -> tuple[Any, ...]:
    """Rows of four candidates of three ids: some drafts are right by chance, and some of those are not valid."""
    B = len(query_lens)
    return r.below(3, B, 4), r.below(3, B, 4), ints(*query_lens)


def likely(r: Draw, B: int, Q: int, V: int, most: int) -> tuple[Any, ...]:
    """Operands whose last row does not ask for log probabilities."""
    return r.f32(B, Q, V), r.below(V, B, Q), ints(*[1] * (B - 1), 0), most


# Operands per primitive. Each needs sizes that are odd somewhere, and for every letter of its factors one example that halves.
EXAMPLES: dict[str, dict[str, Callable[[Draw], tuple[Any, ...]]]] = {
    "accept": {
        "odd": lambda r: accepting(r, 4, 0, 1, 3, 2, 4, 4),
        "even": lambda r: accepting(r, 4, 4, 3, 0),
        "no drafts": lambda r: (r.below(9, 3, 1), r.below(9, 3, 1), ints(1, 0, 1)),
    },
    "add_rms_norm": {
        "odd": lambda r: (r(5, 7), r(5, 7), r(7), 1e-6, 1.0),
        "even": lambda r: (r(4, 7), r(4, 7), r(7), 1e-5, 0.0),
    },
    "adjust_logits": {"odd": lambda r: adjusting(r, 3, 2, 45), "even": lambda r: adjusting(r, 2, 2, 64)},
    "attention_heads": {"odd": lambda r: heads(r, 5, 3, 3, 10, 6), "even": lambda r: heads(r, 4, 2, 2, 6, 6)},
    "slot_mapping": {"odd": lambda r: (ints(6, 0, 11), ints(2, 0, 1), ints([4, 2, 1], [0, 0, 0], [3, 5, 6]), 4, 2)},
    "behind": {"odd": lambda r: (r(5, 7), ints([3], [0], [2])), "even": lambda r: (r(4, 6), ints([1], [3]))},
    "cache_write": {
        "odd": lambda r: (r(3, 5, 1, 7), r(3, 5, 1, 7), r(3, 1, 7), r(3, 1, 7), ints(7, 0, 13)),
        "even": lambda r: (r(3, 4, 2, 3), r(3, 4, 2, 3), r(5, 2, 3), r(5, 2, 3), ints(11, 4, 5, 0, 9)),
    },
    "causal_conv": {
        "decode": lambda r: conv(r, 3, 2, 6, 4, ints([4, 5], [6, 7], [8, 0])),
        "prefill": lambda r: conv(r, 1, 9, 5, 3, ints([4])),
        "decode, one window": lambda r: conv(r, 3, 2, 6, 4, ints([4, 2], [6, 7], [3, 8]), ahead=1),
        "prefill, one window": lambda r: conv(r, 1, 9, 5, 3, ints([4]), ahead=2),
    },
    "chunk_gated_delta": {
        "odd": lambda r: chunked(r, 1, 8, ints([3]), ints(7), 4),
        "one chunk": lambda r: chunked(r, 2, 4, ints([3], [4]), ints(4, 1), 4),
    },
    "delta_gates": {
        "odd": lambda r: (r(2, 3, 5), r(2, 3, 5), r.f32(5), r.f32(5)),
        "even": lambda r: (r(3, 1, 4), r(3, 1, 4), r.f32(4), r.f32(4)),
    },
    "delta_heads": {"odd": lambda r: (r(5, 3, 2 * 7 + 5), 7, 1e-6, 0.3), "even": lambda r: (r(4, 2, 2 * 3 + 8), 3, 1e-6, 1.0)},
    "delta_split": {"odd": lambda r: (r(5, 3, 2 * 7 + 6 * 5 + 6), 7, 5, 3), "even": lambda r: (r(4, 2, 2 * 3 + 4 * 5 + 4), 3, 5, 2)},
    "embed": {"odd": lambda r: (r.below(11, 5), r(11, 3)), "even": lambda r: (r.below(11, 6), r(11, 4))},
    "gated_delta": {
        "decode": lambda r: delta(r, 2, 3, ints([3, 4, 5], [6, 7, 8]), ints(3, 2)),
        "even": lambda r: delta(r, 2, 2, ints([3, 4], [6, 7]), ints(2, 2)),
    },
    "gated_rms_norm": {
        "odd": lambda r: (r(5, 3, 7), r(5, 3, 7), r(7), 1e-6),
        "even": lambda r: (r(4, 2, 5), r(4, 2, 5), r(5), 1e-6),
    },
    "gelu": {"tanh": lambda r: (r(4, 6) * 3, True), "exact": lambda r: (r(5, 7) * 3, False)},
    "grouped_experts": {
        "rows of nobody": lambda r: (r(7, 5), torch.tensor([3, 0, 2]), *grouped_weights(r, 3, 5, 4)),
        "all rows": lambda r: (r(4, 6), torch.tensor([0, 4]), *grouped_weights(r, 2, 6, 3)),
    },
    "fused_experts_w4a8": {"alone": lambda r: fused_experts(r, 8, 4), "wider": lambda r: fused_experts(r, 16, 8)},
    "grouped_experts_w4a16": {
        "rows of nobody": lambda r: weight_quantised(r, (3, 0, 2), 8, 4),
        "groups": lambda r: weight_quantised(r, (1, 6), 16, 8, 4),
    },
    "grouped_experts_w4a8": {
        "rows of nobody": lambda r: quantised(r, (3, 0, 2), 8, 4, quantise_w4),
        "all rows": lambda r: quantised(r, (1, 6), 16, 8, quantise_w4),
    },
    "grouped_experts_w8a8": {
        "rows of nobody": lambda r: quantised(r, (3, 0, 2), 5, 3, quantise_w8),
        "all rows": lambda r: quantised(r, (1, 6), 6, 4, quantise_w8),
    },
    "head_linear": {"odd": lambda r: (r(5, 3, 7), r(3, 7, 4)), "even": lambda r: (r(4, 2, 3), r(2, 3, 5))},
    "l2_norm": {"odd": lambda r: (r(3, 1, 5, 7), 1e-6, 0.5), "even": lambda r: (r(2, 4, 2, 5), 1e-6, 1.0)},
    "last_rows": {"odd": lambda r: (r(9, 5), ints(3, 0, 2)), "even": lambda r: (r(6, 4), ints(1, 3))},
    "linear": {"odd": lambda r: (r(5, 7), r(3, 7)), "even": lambda r: (r(4, 6), r(2, 6))},
    "layer_norm": {"odd": lambda r: (r(5, 7), r(7), r(7), 1e-6), "even": lambda r: (r(4, 6), r(6), r(6), 1e-3)},
    "mla_attention": {"heads": latent_attention},
    "moe_combine": {"alone": dispatched},
    "moe_dispatch": {
        "float": lambda r: (r(3, 5), distinct((0, 3), (3, 1), (5, 4)), r(3, 5), ints(0), 6, "world", 1, False),
        "int8": lambda r: (r(2, 5), distinct((2, 0, 1), (1, 2, 3)), r(2, 5), ints(0), 4, "world", 1, True),
    },
    "moe_experts": {
        "every expert": lambda r: experts(r, 5, 7, 4, 6),
        "few choices": lambda r: experts(r, 1, 6, 9, 4),
        "elsewhere": lambda r: elsewhere(experts(r, 5, 7, 4, 6)),
        "few elsewhere": lambda r: elsewhere(experts(r, 3, 6, 20, 4)),
    },
    "moe_route": {"odd": lambda r: (r(5, 7), 3, True), "even": lambda r: (r(6, 4), 2, False)},
    "moe_route_grouped": {
        "groups": lambda r: (r(5, 12), r.f32(12), 3, 4, 2, True, 2.5),
        "one group": lambda r: (r(4, 7), r.f32(7), 2, 1, 1, False, 1.0),
    },
    "moe_sort": {
        "all here": lambda r: (r(3, 5), distinct((0, 3), (3, 1), (5, 4)), 6, 6, False),
        "elsewhere": lambda r: (r(3, 5), distinct((7, 3), (0, 9), (5, 8)), 6, 10, False),
        "int8": lambda r: (r(3, 5), distinct((7, 3), (0, 9), (5, 8)), 6, 10, True),
    },
    "moe_unsort": {
        "all here": lambda r: (r(6, 5), r.uniform(3, 2).to(r.dtype), ints(4, 2, 0, 1, 3, 5)),
        "elsewhere": lambda r: (r(6, 5), r.uniform(3, 2).to(r.dtype), ints(-1, 2, -1, -1, 0, 1)),
    },
    "paged_attention": {"grouped": attention},
    "quant_cache_write": {"odd": lambda r: rounded_pools(r, False), "even": lambda r: rounded_pools(r, False, 4, 2)},
    "quant_paged_attention": {"grouped": lambda r: rounded_attention(r, False)},
    "static_cache_write": {"odd": lambda r: rounded_pools(r, True), "even": lambda r: rounded_pools(r, True, 4, 2)},
    "static_quant_paged_attention": {"grouped": lambda r: rounded_attention(r, True)},
    "packed_latent_write": {"tiles": lambda r: packed_writing(r, 256, 6), "odd": lambda r: packed_writing(r, 5, 3)},
    "quant_paged_write": {
        "odd": lambda r: (r.below(99, 3, 5, 1, 7).to(torch.int8), r.uniform(3, 5, 1).half(), r(3, 1, 7), ints(7, 0, 13)),
        "even": lambda r: (r.below(99, 3, 4, 2, 3).to(torch.int8), r.uniform(3, 4, 2).half(), r(4, 2, 3), ints(11, 4, 5, 0)),
    },
    "quant_sparse_attention": {"heads": packed_sparse},
    "quant_sparse_index": {"keys": rounded_indexing},
    "paged_write": {
        "odd": lambda r: (r(3, 5, 1, 7), r(3, 1, 7), ints(7, 0, 13)),
        "even": lambda r: (r(3, 4, 2, 3), r(5, 2, 3), ints(11, 4, 5, 0, 9)),
    },
    "picture_places": {
        "one of padding": lambda r: (ints([4, 6], [0, 0], [2, 12], [4, 2]), 24, 2, 5),
        "every place": lambda r: (ints([9, 3]), 27, 3, 7),
    },
    "positions": {"odd": lambda r: (ints(6, 0, 11), 3)},
    "quant_linear": {
        "odd": lambda r: (r(5, 7), *quantise_w8(r(7, 3))),
        "even": lambda r: (torch.cat([r(3, 6), r(1, 6) * 0]), *quantise_w8(r(6, 2))),
    },
    "quant_linear_biased": {
        "odd": lambda r: (r(5, 7), *quantise_w8(r(7, 3)), r(3)),
        "even": lambda r: (torch.cat([r(3, 6), r(1, 6) * 0]), *quantise_w8(r(6, 2)), r(2)),
    },
    "quant_linear_w4a8": {
        "channels": lambda r: (r(4, 7), *quantise_w4(r(7, 16))),
        "groups": lambda r: (r(4, 12), *quantise_w4(r(12, 8), 4)),
    },
    "rms_norm": {
        "rows": lambda r: (r(5, 7), r(7), 1e-6, 1.0),
        "heads": lambda r: (r(4, 2, 8), r(8), 1e-5, 0.0),
        "even": lambda r: (r(4, 7), r(7), 1e-5, 0.0),
    },
    "rope": {
        "partial": lambda r: rotation(r, 5, 3, 10, 4),
        "whole": lambda r: rotation(r, 4, 2, 6, 6),
    },
    "rope_angles": {"odd": lambda r: (r.below(1000, 5), 6, 1e4), "even": lambda r: (r.below(1000, 4), 2, 1e6)},
    "scaled_rope_angles": {
        "odd": lambda r: (r.below(1000, 5), 6, 1e4, 4.0, 0.0, 2.0, 1.25, False),
        "even": lambda r: (r.below(1000, 4), 4, 1e6, 8.0, -1.0, 0.0, 1.0, False),
        "frequencies": lambda r: (r.below(1000, 4), 6, 1e4, 8.0, 0.5, 0.001, 1.0, True),
    },
    "mask_logits": {"odd": lambda r: masking(r, 3, 2, 45), "even": lambda r: masking(r, 2, 2, 64)},
    "sample": {"odd": lambda r: sampling(r, 3, 1, 9), "even": lambda r: sampling(r, 4, 2, 8)},
    "segment_attention": {"padded": segments, "one": lambda r: (r(1, 5, 2, 7), r(1, 5, 2, 7), r(1, 5, 2, 7), ints(5), 7**-0.5)},
    "sparse_attention": {"heads": sparse},
    "sparse_index": {"keys": indexing},
    "request_slot_write": {"odd": lambda r: (r.below(99, 7, 3), ints(4, 0, 1, 6), r.below(99, 4, 3))},
    "static_quant_linear": {"odd": lambda r: static(r, 5, 7, 3), "even": lambda r: static(r, 4, 6, 2)},
    "swiglu": {"odd": lambda r: (r(5, 14),), "even": lambda r: (r(4, 6),)},
    "swiglu_linear": {"odd": lambda r: (r(5, 7), r(2, 3, 7)), "even": lambda r: (r(4, 3), r(2, 6, 3))},
    "weight_quant_linear": {
        "channels": lambda r: (r(4, 7), *packed(r(7, 16))),
        "groups": lambda r: (r(4, 12), *packed(r(12, 8), 4)),
    },
    "token_logprobs": {"odd": lambda r: likely(r, 3, 1, 9, 4), "even": lambda r: likely(r, 4, 2, 8, 1)},
}

# Primitives without gradients: integers, rounding to integers, and thresholds and random numbers of sampling.
WITHOUT_GRADIENT = (
    *("accept", "slot_mapping", "positions", "rope_angles", "scaled_rope_angles", "sample", "request_slot_write"),
    *("adjust_logits", "mask_logits", "picture_places"),
    *("fused_experts_w4a8", "grouped_experts_w4a16", "grouped_experts_w4a8", "grouped_experts_w8a8"),
    *("moe_dispatch", "moe_route_grouped", "moe_sort"),
    *("quant_linear", "quant_linear_biased", "quant_linear_w4a8", "sparse_index", "static_quant_linear", "weight_quant_linear"),
    *("quant_cache_write", "quant_paged_attention", "static_cache_write", "static_quant_paged_attention"),
    *("packed_latent_write", "quant_paged_write", "quant_sparse_attention", "quant_sparse_index"),
)

# Rows that share pages read them once each, which is more bytes than the operands have.
REREADS = (
    *("mla_attention", "paged_attention", "quant_paged_attention", "quant_sparse_attention", "quant_sparse_index"),
    *("sparse_attention", "sparse_index", "static_quant_paged_attention"),
)


@dataclass(frozen=True)
class Case:
    """One example of one primitive in one dtype."""

    name: str
    label: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}-{self.label}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def primitive(self) -> Primitive:
        return TABLE[self.name]

    @property
    def args(self) -> tuple[Any, ...]:
        assert self.label != "no example", f"primitive {self.name!r} has no example operands in EXAMPLES"
        return EXAMPLES[self.name][self.label](Draw(self.dtype))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]


# Only the project's own primitives: other test files temporarily define some.
NAMES = sorted(name for name, p in TABLE.items() if p.rule("reference").__module__.startswith(ops.__name__))
CASES = [Case(name, label, dtype) for name in NAMES for label in EXAMPLES.get(name, ["no example"]) for dtype in DTYPES]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results or ())


def clone(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def same(got: Any, want: Any, tolerance: float = 0.0) -> None:
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def donating(primitive: Primitive, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """All results of the in-place variant, donated operands included."""
    returned = iter(flat(primitive.inplace_op(*args)))
    donated = {result: args[operand] for operand, result in primitive.donates}
    return [donated[i] if i in donated else next(returned) for i in range(len(primitive.op._schema.returns))]


def lowerings(primitive: Primitive) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Lowerings for this machine, on operands of their own, since they may write pools; tests/lowering/ascend runs others."""
    for facet, fn in primitive._rules.items():
        if facet == "lowering:inductor":
            yield facet, lambda *args, fn=fn: fn(*clone(args))


def implementations(primitive: Primitive) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function that a backend may run for a node, except the reference itself."""
    yield "operator", primitive.op
    yield from lowerings(primitive)
    if primitive.has("inplace"):
        yield "inplace", lambda *args: donating(primitive, clone(args))


def test_every_primitive_has_examples_and_every_example_a_primitive() -> None:
    assert set(EXAMPLES) == set(NAMES)


# --- abstract ---


def as_is(x: torch.Tensor) -> torch.Tensor:
    return x


def part_of_a_wider_row(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a larger tensor, as splitting a fused projection gives them."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def laid_out(case: Case, layout: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    """Operands in the given layout; pools are always contiguous."""
    pools = {operand for operand, _ in case.primitive.donates}
    wanted = [isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() > 1 and i not in pools for i, a in enumerate(case.args)]
    return tuple(layout(a) if change else a for a, change in zip(case.args, wanted, strict=True))


def kind(x: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the strides of dimensions with more than one element; the others are arbitrary."""
    return x.shape, x.dtype, [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("layout", [as_is, part_of_a_wider_row, swapped], ids=lambda layout: layout.__name__)
@each(CASES)
def test_abstract_is_what_the_reference_returns(case: Case, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    args = laid_out(case, layout)
    metas = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a for a in args]
    want = [kind(t) for t in flat(case.primitive.rule("reference")(*args))]
    results = flat(case.primitive.rule("abstract")(*metas))
    assert [kind(t) for t in results] == want
    assert {t.device.type for t in results} == {"meta"}
    assert [kind(t) for t in flat(case.primitive.op(*metas))] == want


@each([c for c in CASES if c.dtype == torch.float32])
def test_schema_and_fake_tensors_hold(case: Case) -> None:
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(case.primitive.op, case.args, test_utils=utils)
    if case.primitive.has("inplace"):
        torch.library.opcheck(case.primitive.inplace_op, case.args, test_utils=utils)


# --- meaning ---


@pytest.mark.parametrize("layout", [as_is, part_of_a_wider_row], ids=lambda layout: layout.__name__)
@each(CASES)
def test_every_implementation_is_the_reference(case: Case, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    want = case.primitive.rule("reference")(*case.args)
    for name, run in implementations(case.primitive):
        exact = name in ("operator", "inplace") and layout is as_is
        same(run(*laid_out(case, layout)), want, 0.0 if exact else case.tolerance)


@each(CASES)
def test_reference_leaves_its_operands_alone(case: Case) -> None:
    args, before = case.args, case.args
    results = flat(case.primitive.rule("reference")(*args))
    same([a for a in args if isinstance(a, torch.Tensor)], [a for a in before if isinstance(a, torch.Tensor)])
    memory = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    assert not memory & {t.untyped_storage().data_ptr() for t in results}


@each([c for c in CASES if TABLE[c.name].donates])
def test_in_place_variant_writes_its_donated_operands_only(case: Case) -> None:
    primitive, args, before = case.primitive, case.args, case.args
    want = flat(primitive.rule("reference")(*before))
    results = flat(primitive.inplace_op(*args))
    donated = dict(primitive.donates)
    for i, (now, was) in enumerate(zip(args, before, strict=True)):
        if isinstance(now, torch.Tensor):
            same(now, want[donated[i]] if i in donated else was)
            assert torch.equal(now, was) == (i not in donated), f"operand {i}"
    same(results, [want[i] for i in primitive.kept_results])


def test_donation_is_declared_where_there_is_an_in_place_variant() -> None:
    for name in NAMES:
        assert TABLE[name].has("inplace") == bool(TABLE[name].donates), name


@each(CASES)
def test_cost_counts_what_is_there(case: Case) -> None:
    args = case.args
    cost = case.primitive.rule("cost")(*args)
    metas = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    assert cost == case.primitive.rule("cost")(*metas)
    assert isinstance(cost, Cost)
    assert all(type(n) is int and n >= 0 for n in (cost.flops, cost.read_bytes, cost.write_bytes))
    written = nbytes(*flat(case.primitive.rule("reference")(*args)))
    operand_bytes = nbytes(*[a for a in args if isinstance(a, torch.Tensor)])
    assert 0 < cost.write_bytes < written if case.primitive.donates else cost.write_bytes == written
    assert cost.read_bytes > 0
    assert cost.read_bytes <= operand_bytes or case.name in REREADS


# --- gradients ---


@each([c for c in CASES if c.dtype == torch.float32 and c.name not in WITHOUT_GRADIENT])
def test_gradients_are_slopes(case: Case) -> None:
    """The gradient along a random direction of all float operands equals the difference quotient."""
    args, r = case.args, Draw(seed=8)
    at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    toward = {i: r(*args[i].shape) for i in at}
    weights = [r(*t.shape) if t.is_floating_point() else None for t in flat(case.primitive.rule("reference")(*args))]

    def value(operands: list[Any]) -> torch.Tensor:
        pairs = zip(flat(case.primitive(*operands)), weights, strict=True)
        return torch.stack([(t.double() * weight).sum() for t, weight in pairs if weight is not None]).sum()

    def moved(step: float) -> list[Any]:
        return [a + step * toward[i] if i in toward else a for i, a in enumerate(args)]

    leaves = [a.clone().requires_grad_() if i in toward else a for i, a in enumerate(args)]
    value(leaves).backward()
    slope = sum((leaves[i].grad * toward[i]).sum().item() for i in at)
    assert math.isclose(slope, ((value(moved(1e-3)) - value(moved(-1e-3))) / 2e-3).item(), rel_tol=1e-2, abs_tol=1e-2)
    assert all(leaves[i].grad.isfinite().all() and leaves[i].grad.any() for i in at)


# --- sharded == whole ---

Strategy = tuple[list[Placement], list[Placement]]


def ranks(primitive: Primitive, args: tuple[Any, ...]) -> list[int]:
    return [a.dim() for a, tensor in zip(args, primitive.tensor_arguments, strict=True) if tensor]


def by_letter(primitive: Primitive, args: tuple[Any, ...]) -> dict[str, Strategy]:
    _, *by_letters = strategies(primitive, ranks(primitive, args))
    letters = primitive.factors.ranked(ranks(primitive, args)).letters
    return dict(zip(letters, by_letters, strict=True))


def split(args: tuple[Any, ...], primitive: Primitive, placements: list[Placement]) -> list[tuple[Any, ...]] | None:
    """Operands of two shards, or None where a size is odd."""
    rest, shards = iter(placements), ([], [])
    for arg, tensor in zip(args, primitive.tensor_arguments, strict=True):
        place = next(rest) if tensor else None
        if place is not None and place.is_shard():
            if arg.shape[place.dim] % 2:
                return None
            halves = [half.contiguous() for half in arg.chunk(2, place.dim)]
        else:
            halves = [arg, arg]
        for shard, half in zip(shards, halves, strict=True):
            shard.append(half)
    return [tuple(shard) for shard in shards]


def sharded(run: Callable[..., Any], primitive: Primitive, args: tuple[Any, ...], axes: list[Strategy]) -> list[torch.Tensor] | None:
    """Results of all shards on a mesh of two-way axes, joined by their placements; None where a size is odd."""
    if not axes:
        return flat(run(*args))
    (results, operands), *inner = axes
    shards = split(args, primitive, operands)
    parts = shards and [sharded(run, primitive, shard, inner) for shard in shards]
    if not parts or None in parts:
        return None
    return [joined(place, *pair) for place, *pair in zip(results, *parts, strict=True)]


def joined(place: Placement, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if place.is_shard():
        return torch.cat([first, second], place.dim)
    if place.is_partial():
        return first + second
    same(first, second)
    return first


@pytest.mark.parametrize("name", NAMES)
def test_sharded_by_any_letter_is_the_whole(name: str) -> None:
    primitive, halved, letters = TABLE[name], set(), set()
    for case in (c for c in CASES if c.name == name):
        want = primitive.rule("reference")(*case.args)
        for letter, strategy in by_letter(primitive, case.args).items():
            letters.add(letter)
            for run in (primitive.rule("reference"), *(fn for _, fn in lowerings(primitive))):
                got = sharded(run, primitive, case.args, [strategy])
                if got is not None:
                    halved.add(letter)
                    same(got, want, case.tolerance)
    assert halved == letters, f"no example of {name!r} can be halved along {letters - halved}"


@pytest.mark.parametrize("name", NAMES)
def test_sharded_by_two_letters_at_once_is_the_whole(name: str) -> None:
    primitive, done, pairs = TABLE[name], set(), set()
    for case in (c for c in CASES if c.name == name and c.dtype == torch.float32):
        want = primitive.rule("reference")(*case.args)
        by_letters = by_letter(primitive, case.args)
        for pair in permutations(by_letters, 2):
            pairs.add(pair)
            got = sharded(primitive.rule("reference"), primitive, case.args, [by_letters[letter] for letter in pair])
            if got is not None:
                done.add(pair)
                same(got, want, case.tolerance)
    assert done == pairs, f"no example of {name!r} can be quartered along {pairs - done}"


# --- poison: the contents of padding, null pages and unused slots reach no live row ---

Live = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def poisoned_conv(r: Draw, Q: int, write: torch.Tensor, query_lens: tuple[int, ...]) -> tuple[Any, Any, Live]:
    """Row 0 is a new request in an unwritten slot, row 1 continues from slot 2, row 2 is padding."""
    B = len(query_lens)
    clean = (r(B, Q, 6), r(6, 4), r(9, 3, 6), ints(*[8, 2, 0][:B]), write, ints(*[0, 3, 0][:B]), ints(*query_lens), r.dtype)
    x = poison(clean[0], *[(b, slice(length, None)) for b, length in enumerate(query_lens)])
    used = write[:, -1].tolist()[: 2 if B == 3 else B]
    return (
        clean,
        (x, clean[1], poison(clean[2], 0, 8), *clean[3:]),
        lambda t: [
            *(t[0][b, :length] for b, length in enumerate(query_lens)),
            t[1][used],
            t[1][2],
        ],
    )


def poisoned_delta(r: Draw, Q: int, write: torch.Tensor, query_lens: tuple[int, ...]) -> tuple[Any, Any, Live]:
    B = len(query_lens)
    q, k, v = r.unit(B, Q, 2, 3), r.unit(B, Q, 2, 3), r(B, Q, 4, 5)
    return spoiled_rows(r, (q, k, v, -r.uniform(B, Q, 4), r.uniform(B, Q, 4)), (), write, query_lens)


def poisoned_chunks(r: Draw, Q: int, write: torch.Tensor, query_lens: tuple[int, ...]) -> tuple[Any, Any, Live]:
    B = len(query_lens)
    return spoiled_rows(r, (r(B, Q, 2, 16), r(B, Q, 2, 4)), (r.f32(4), r.f32(4)), write, query_lens, 1e-6, 4)


def spoiled_rows(
    r: Draw, tokens: tuple[Any, ...], weights: tuple[Any, ...], write: torch.Tensor, query_lens: tuple[int, ...], *rest: Any
) -> tuple[Any, Any, Live]:
    """Operands of the delta rule, clean, and with NaN in `tokens` beyond the rows' lengths and in unwritten slots."""
    B = len(query_lens)
    slots = (ints(*[8, 2, 0][:B]), write, ints(*[0, 3, 0][:B]), ints(*query_lens), *rest)
    pool, padding = r.f32(9, 4, 5, 3), [(b, slice(length, None)) for b, length in enumerate(query_lens)]
    used = write[:, -1].tolist()[: 2 if B == 3 else B]
    spoiled = (*(poison(x, *padding) for x in tokens), *weights, poison(pool, 0, 8), *slots)
    return (*tokens, *weights, pool, *slots), spoiled, lambda t: [*(t[0][b, :n] for b, n in enumerate(query_lens)), t[1][used], t[1][2]]


def poisoned_attention(r: Draw) -> tuple[Any, Any, Live]:
    """Row 0 has 9 keys in pages 4, 2, 1, row 1 has 2 in page 3, row 2 is padding; pages 0 and 5 are unused."""
    table = ints([4, 2, 1], [3, 0, 0], [0, 0, 0])
    clean = (r(3, 3, 4, 5), r(6, 4, 2, 5), r(6, 4, 2, 5), table, ints(7, 0, 0), ints(2, 2, 0), 0.4)
    unused = (0, 5, (1, slice(1, None)), (3, slice(2, None)))
    spoiled = (poison(clean[0], (0, 2), (1, 2), 2), poison(clean[1], *unused), poison(clean[2], *unused), *clean[3:])
    return clean, spoiled, lambda t: [t[0][:2, :2]]


def poisoned_segments(r: Draw) -> tuple[Any, Any, Live]:
    clean = segments(r)
    padding = [(b, slice(length, None)) for b, length in enumerate(clean[3].tolist())]
    return clean, (*(poison(x, *padding) for x in clean[:3]), *clean[3:]), lambda t: t


def poisoned_rounding(r: Draw, static: bool) -> tuple[Any, Any, Live]:
    """The second token is padding: it is written to the null page."""
    clean, first = rounded_pools(r, static), 2 if static else 4
    return clean, tuple(poison(a, 1) if i in (first, first + 1) else a for i, a in enumerate(clean)), lambda t: [x[1:] for x in t]


def poisoned_scales(r: Draw) -> tuple[Any, Any, Live]:
    """As `poisoned_attention`: integers hold no NaN, so that scales do."""
    plain, _, live = poisoned_attention(r)
    pools = [(r.below(255, 6, 4, 2, 5) - 127).to(torch.int8) for _ in range(2)]
    scales = [r.uniform(6, 2, 4) / 64 for _ in range(2)]
    unused = (0, 5, (1, slice(None), slice(1, None)), (3, slice(None), slice(2, None)))
    query = poison(plain[0], (0, 2), (1, 2), 2)
    return (plain[0], *pools, *scales, *plain[3:]), (query, *pools, *(poison(x, *unused) for x in scales), *plain[3:]), live


def poisoned_latents(r: Draw) -> tuple[Any, Any, Live]:
    """As `poisoned_attention`."""
    table = ints([4, 2, 1], [3, 0, 0], [0, 0, 0])
    clean = (r(3, 3, 4, 5), r(3, 3, 4, 2), r(6, 4, 1, 5), r(6, 4, 1, 2), table, ints(7, 0, 0), ints(2, 2, 0), 0.4)
    unused = (0, 5, (1, slice(1, None)), (3, slice(2, None)))
    queries, pools = [poison(x, (0, 2), (1, 2), 2) for x in clean[:2]], [poison(x, *unused) for x in clean[2:4]]
    return clean, (*queries, *pools, *clean[4:]), lambda t: [t[0][:2, :2]]


def poisoned_choice(r: Draw, name: str) -> tuple[Any, Any, Live]:
    """As `poisoned_latents`, of the indexer or of attention over what it chooses."""
    clean, spoiled, live = poisoned_latents(r)
    if name == "sparse_index":
        clean, spoiled = ((x[0], x[1][..., 0], x[2], *x[4:7], 5) for x in (clean, spoiled))
        return clean, spoiled, lambda t: [t[0][:2, :2].sort(-1).values]
    indices = ints([[7, 0, 3], [1, 8, -1], [9, 2, 5]], [[0, -1, -1], [1, 0, -1], [2, -1, -1]], [[0, -1, -1]] * 3)
    clean, spoiled = ((*x[:4], indices, *x[4:]) for x in (clean, spoiled))
    return clean, spoiled, live


def poisoned_packed(r: Draw) -> tuple[Any, Any, Live]:
    """As `poisoned_choice`, over packed rows; bytes of all ones are NaN as rotary parts and as scales."""
    clean, spoiled, live = poisoned_choice(r, "sparse_attention")
    pool = packed_pool(r, 5, 2)
    unread = pool.clone()
    for place in (0, 5, (1, slice(1, None)), (3, slice(2, None))):
        unread[place] = -1
    return (*clean[:2], pool, *clean[4:]), (*spoiled[:2], unread, *spoiled[4:]), live


def poisoned_keys(r: Draw) -> tuple[Any, Any, Live]:
    """As `poisoned_choice`, of the indexer over keys of int8."""
    (q, weights, keys, *place), (query, shares, _, *_), live = poisoned_choice(r, "sparse_index")
    rows, scale = (r.below(255, *keys.shape) - 127).to(torch.int8), r.uniform(6, 4, 1).half() / 64
    unread = poison(scale, 0, 5, (1, slice(1, None)), (3, slice(2, None)))
    return (q, weights, rows, scale, *place), (query, shares, rows, unread, *place), live


def poisoned_cache(r: Draw) -> tuple[Any, Any, Live]:
    clean = (r(4, 2, 2, 3), r(4, 2, 2, 3), r(4, 2, 3), r(4, 2, 3), ints(5, 0, 2, 1))
    k, v = (poison(x, 1, 3) for x in clean[2:4])
    return (
        clean,
        (poison(clean[0], 0, (2, 0)), poison(clean[1], 0, (2, 0)), k, v, clean[4]),
        lambda t: [x[index] for x in t for index in (1, (2, 1), 3)],
    )


def poisoned_last_rows(r: Draw) -> tuple[Any, Any, Live]:
    x, query_lens = r(9, 5), ints(2, 3, 1)
    return (x, query_lens), (poison(x, 2, 7, 8), query_lens), lambda t: t


def poisoned_few_choices(r: Draw) -> tuple[Any, Any, Live]:
    clean = experts(r, 3, 6, 20, 4)
    return clean, (poison(clean[0], -1), poison(clean[1], -1), *clean[2:]), lambda t: [x[:-1] for x in t]


def poisoned_after_groups(r: Draw, name: str) -> tuple[Any, Any, Live]:
    """Rows beyond the sum of the counts are undefined."""
    clean = EXAMPLES[name]["rows of nobody"](r)
    return clean, tuple(poison(a, slice(5, None)) if i == name.endswith("a8") else a for i, a in enumerate(clean)), lambda t: [t[0][:5]]


def poisoned_last_sorted(r: Draw, name: str, label: str, live: int) -> tuple[Any, Any, Live]:
    """The last token is padding; its rows come last."""
    clean = EXAMPLES[name][label](r)
    return clean, (poison(clean[0], -1), *clean[1:]), lambda t: [t[0][:live], t[1][:live], *t[2:]]


def poisoned_unsort(r: Draw) -> tuple[Any, Any, Live]:
    """Rows that no choice refers to are undefined."""
    clean = EXAMPLES["moe_unsort"]["elsewhere"](r)
    return clean, (poison(clean[0], slice(3, None)), *clean[1:]), lambda t: t


def poisoned_combine(r: Draw) -> tuple[Any, Any, Live]:
    clean = dispatched(r)
    return clean, (poison(clean[0], -1, -2), clean[1], poison(clean[2], -1), *clean[3:]), lambda t: [t[0][:-1]]


def rows(r: Draw, name: str, label: str, operands: tuple[int, ...]) -> tuple[Any, Any, Live]:
    """The last row of these operands is padding."""
    clean = EXAMPLES[name][label](r)
    return clean, tuple(poison(a, -1) if i in operands else a for i, a in enumerate(clean)), lambda t: [x[:-1] for x in t]


def unnamed_adjustments(r: Draw) -> tuple[Any, Any, Live]:
    """The third adjustment is nobody's, and no row without one reads any."""
    logits, adjustments, *others = clean = adjusting(r, 2, 2, 64)
    return clean, (logits, poison(adjustments, 2), *others), lambda t: t


# Primitives whose rows are independent, of whose first operand alone the last is poisoned; and those without padding that can be.
BY_ROWS = (
    *("attention_heads", "behind", "delta_heads", "delta_split", "gelu", "l2_norm", "linear", "head_linear", "layer_norm"),
    *("mask_logits", "moe_route", "moe_route_grouped", "weight_quant_linear", "quant_linear", "quant_linear_biased"),
    *("quant_linear_w4a8", "rms_norm", "rope", "sample", "static_quant_linear", "swiglu", "swiglu_linear", "token_logprobs"),
)
UNPOISONED = (
    *("accept", "slot_mapping", "embed", "static_quant_paged_attention", "packed_latent_write", "quant_paged_write", "paged_write"),
    *("picture_places", "positions", "rope_angles", "scaled_rope_angles", "request_slot_write"),
)

POISONS: dict[str, list[Callable[[Draw], tuple[Any, Any, Live]]]] = {
    **{name: [partial(rows, name=name, label=next(iter(EXAMPLES[name])), operands=(0,))] for name in BY_ROWS},
    **{name: [] for name in UNPOISONED},
    "add_rms_norm": [lambda r: rows(r, "add_rms_norm", "odd", (0, 1))],
    "adjust_logits": [lambda r: rows(r, "adjust_logits", "odd", (0,)), unnamed_adjustments],
    "cache_write": [poisoned_cache],
    "causal_conv": [
        lambda r: poisoned_conv(r, 2, ints([3, 4], [5, 6], [0, 0]), (2, 2, 0)),
        lambda r: poisoned_conv(r, 1, ints([3], [5], [0]), (1, 1, 0)),
        lambda r: poisoned_conv(r, 7, ints([3]), (5,)),
        lambda r: poisoned_conv(r, 7, ints([3]), (2,)),
    ],
    "chunk_gated_delta": [
        lambda r: poisoned_chunks(r, 8, ints([3]), (5,)),
        lambda r: poisoned_chunks(r, 8, ints([3], [5], [0]), (3, 8, 0)),
    ],
    "delta_gates": [lambda r: rows(r, "delta_gates", "odd", (0, 1))],
    "gated_delta": [
        lambda r: poisoned_delta(r, 2, ints([3, 4], [5, 6], [0, 0]), (2, 2, 0)),
        lambda r: poisoned_delta(r, 1, ints([3], [5], [0]), (1, 1, 0)),
    ],
    "gated_rms_norm": [lambda r: rows(r, "gated_rms_norm", "odd", (0, 1))],
    "grouped_experts": [lambda r: poisoned_after_groups(r, "grouped_experts")],
    "fused_experts_w4a8": [lambda r: rows(r, "fused_experts_w4a8", "alone", (0, 2))],
    "grouped_experts_w4a16": [lambda r: poisoned_after_groups(r, "grouped_experts_w4a16")],
    "grouped_experts_w4a8": [lambda r: poisoned_after_groups(r, "grouped_experts_w4a8")],
    "grouped_experts_w8a8": [lambda r: poisoned_after_groups(r, "grouped_experts_w8a8")],
    "last_rows": [poisoned_last_rows],
    "mla_attention": [poisoned_latents],
    "moe_combine": [poisoned_combine],
    "moe_dispatch": [lambda r: poisoned_last_sorted(r, "moe_dispatch", "float", 4)],
    "moe_experts": [
        lambda r: rows(r, "moe_experts", "every expert", (0, 1)),
        poisoned_few_choices,
    ],
    "moe_sort": [
        lambda r: poisoned_last_sorted(r, "moe_sort", "all here", 4),
        lambda r: poisoned_last_sorted(r, "moe_sort", "elsewhere", 2),
        lambda r: poisoned_last_sorted(r, "moe_sort", "int8", 2),
    ],
    "moe_unsort": [poisoned_unsort],
    "quant_cache_write": [lambda r: poisoned_rounding(r, False)],
    "quant_paged_attention": [poisoned_scales],
    "static_cache_write": [lambda r: poisoned_rounding(r, True)],
    "quant_sparse_attention": [poisoned_packed],
    "quant_sparse_index": [poisoned_keys],
    "paged_attention": [poisoned_attention],
    "segment_attention": [poisoned_segments],
    "sparse_attention": [lambda r: poisoned_choice(r, "sparse_attention")],
    "sparse_index": [lambda r: poisoned_choice(r, "sparse_index")],
}


@pytest.mark.parametrize("name", NAMES)
def test_poison_reaches_no_live_row(name: str) -> None:
    for make in POISONS[name]:
        clean, spoiled, live = make(Draw())
        want = live(flat(TABLE[name].rule("reference")(*clean)))
        assert all(not t.is_floating_point() or t.isfinite().all() for t in want)
        for _, run in implementations(TABLE[name]):
            same(live(flat(run(*clone(spoiled)))), want, 1e-6)


def test_a_poisoned_row_says_so_and_the_others_sample_tokens() -> None:
    _, spoiled, _ = rows(Draw(), "sample", "even", (0,))
    got = ops.sample(*spoiled)
    assert (got[-1] == NON_FINITE).all()
    assert ((got[:-1] >= 0) & (got[:-1] < spoiled[0].shape[-1])).all()
