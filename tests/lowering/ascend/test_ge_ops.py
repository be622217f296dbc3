"""Every primitive's lowering for GE computes what its reference computes, and the real torchair converts it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import npu_lowerings as lowerings
from support.draws import NAN, Draw, ints, poison
from support.npu_lowerings import TOLERANCE, Example, close, converted, executed, reference, special
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs import ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.ops import chunk_gated_delta, gated_delta
from npucompile.graphs.ops.packed_latents import packed_width
from npucompile.graphs.primitive import TABLE
from npucompile.graphs.quantise import quantise_rows
from npucompile.lowering.ascend.operators.table import BY_TYPE
from npucompile.lowering.ascend.toolchain.harness import Torchair

pytestmark = pytest.mark.usefixtures("ta")


def rotation(r: Draw, width: int) -> Example:
    return Example((r(5, 3, 16), *ops.rope_angles(r.below(100, 5), width, 1e4)))


def heads(r: Draw, G: int) -> Example:
    return Example((r(5, G, 10 * 16), r(16), r(16), *ops.rope_angles(r.below(100, 5), 8, 1e4), 1e-6))


def writing(r: Draw) -> Example:
    """Tokens 1 and 3 are padding."""
    pools = [poison(r(4, 2, 2, 3), 0, (2, 0)) for _ in range(2)]
    tokens = [poison(r(4, 2, 3), 1, 3) for _ in range(2)]
    return Example((*pools, *tokens, ints(5, 0, 2, 1)), lambda t: [x[at] for x in t for at in (1, (2, 1), 3)])


def attention(r: Draw, Q: int) -> Example:
    """Row 0 continues after 7 keys in pages 4, 2, 1, row 1 begins in page 3, row 2 is padding; pages 0 and 5 are unused."""
    table, num_computed_tokens, query_lens = ints([4, 2, 1], [3, 0, 0], [0, 0, 0]), ints(7, 0, 0), ints(Q, 1 if Q == 1 else Q - 1, 0)
    num_keys = (7 + Q) % 4 or 4
    unused = (0, 5, (1, slice(num_keys, None)), (3, slice(Q, None)))
    q, k, v = poison(r(3, Q, 4, 8), 2), poison(r(6, 4, 2, 8), *unused), poison(r(6, 4, 2, 8), *unused)
    return Example((q, k, v, table, num_computed_tokens, query_lens, 0.4), lambda t: [t[0][b, : query_lens[b]] for b in range(2)])


def rounding(r: Draw) -> Example:
    """Tokens 1 and 3 are padding; scales of unwritten places are NaN."""
    pools = [torch.zeros(4, 2, 2, 3, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((4, 2, 2), NAN) for _ in range(2)]
    tokens = [poison(r(4, 2, 3), 1, 3) for _ in range(2)]
    written = [(2, slice(None), 1), (1, slice(None), 0)]  # slots 5 and 2
    return Example(
        (*pools, *scales, *tokens, ints(5, 0, 2, 1)),
        lambda t: [*(x[at] for x in t[:2] for at in ((2, 1), (1, 0))), *(x[at] for x in t[2:] for at in written)],
    )


def rounding_by_channels(r: Draw) -> Example:
    pools = [torch.zeros(4, 2, 2, 3, dtype=torch.int8) for _ in range(2)]
    tokens = [poison(r(4, 2, 3), 1, 3) for _ in range(2)]
    scales = [(1 + r.uniform(2, 3)) / 64 for _ in range(2)]
    return Example((*pools, *tokens, *scales, ints(5, 0, 2, 1)), lambda t: [x[at] for x in t for at in ((2, 1), (1, 0))])


def rounded(r: Draw, Q: int, static: bool) -> Example:
    """As `attention`, over int8 and with more pages; what is not read has a scale of NaN, or static the largest integer."""
    table, computed, lengths = ints([4, 2, 1, 6], [3, 5, 0, 0], [0, 0, 0, 0]), ints(7, 0, 0), ints(Q, max(1, Q - 1), 0)
    read = torch.zeros(8, 4, 2, dtype=torch.bool)
    for b in range(2):
        for j in range(int(computed[b] + lengths[b])):
            read[table[b, j // 4], j % 4] = True
    q, unread, place = poison(r(3, Q, 4, 8), 2), ~read, (table, computed, lengths, 0.4)
    k = r(8, 4, 2, 8)
    caches = [torch.where(unread[..., None], 127, r.below(255, *k.shape) - 127).to(torch.int8) for _ in range(2)]
    scales = [(1 + r.uniform(*((2, 8) if static else (8, 2, 4)))) / 64 for _ in range(2)]
    scales = scales if static else [torch.where(unread.transpose(1, 2), NAN, scale) for scale in scales]
    return Example((q, *caches, *scales, *place), lambda t: [t[0][b, : lengths[b]] for b in range(2)])


def latents(r: Draw, Q: int) -> Example:
    """As `attention`; with more than 16 queries row 0 spans several calls of the kernel's."""
    pages = -(-(7 + Q) // 4)
    table = torch.zeros(3, pages, dtype=torch.int32)
    table[0], table[1] = torch.arange(2, 2 + pages), torch.arange(2 + pages, 2 + 2 * pages)
    lengths = ints(Q, 1 if Q == 1 else Q - 1, 0)
    pools = [r(3 + 2 * pages, 4, 1, width) for width in (8, 4)]
    for pool in pools:
        pool[:2], pool[-1] = NAN, NAN
        pool[1 + pages, (7 + Q) % 4 or 4 :] = NAN
        pool.flatten(0, 1)[(2 + pages) * 4 + Q :] = NAN
    q, q_rope = poison(r(3, Q, 4, 8), 2), poison(r(3, Q, 4, 4), 2)
    return Example((q, q_rope, *pools, table, ints(7, 0, 0), lengths, 0.4), lambda t: [t[0][b, : lengths[b]] for b in range(2)])


def choosing(r: Draw, Q: int, name: str) -> Example:
    """As `latents`, of the indexer, whose choice is compared in order of position, or of attention over what it chooses."""
    whole = latents(r, Q)
    q, q_rope, cache, rope_cache, table, computed, lengths, scale = whole.args
    if name == "sparse_index":
        args = (q, q[..., 0].clone(), cache, table, computed, lengths, 5)
        return Example(args, lambda t: [t[0][b, : lengths[b]].sort(-1).values for b in range(2)])
    indices = torch.tensor([5, 0, 3, 1]).expand(3, Q, 4)
    seen = (computed[:, None] + torch.arange(Q))[..., None]
    indices = torch.where(indices <= seen, indices, -1).sort(-1, descending=True).values.int()
    return Example((q, q_rope, cache, rope_cache, indices, table, computed, lengths, scale), whole.live)


def rounded_keys(r: Draw, Q: int) -> Example:
    """As `choosing`, of the indexer over keys of int8; what is not read has a scale of NaN."""
    whole = choosing(r, Q, "sparse_index")
    q, weights, cache, *rest = whole.args
    rows, scale = quantise_rows(cache.nan_to_num())
    return Example((q, weights, rows, torch.where(cache.isnan().any(-1), NAN, scale).half(), *rest), whole.live)


def packed(r: Draw, Q: int) -> Example:
    """As `choosing`, of attention over packed rows; bytes of all ones are NaN as rotary parts and as scales."""
    whole = choosing(r, Q, "sparse_attention")
    q, q_rope, cache, rope_cache, *rest = whole.args
    empty = torch.full((*cache.shape[:3], packed_width(8, 4, r.dtype)), -1, dtype=torch.int8)
    tokens = (x.flatten(0, 1) for x in (cache, rope_cache))
    pool = ops.packed_latent_write(empty, *tokens, torch.arange(4 * len(cache), dtype=torch.int32)).flatten(0, 1)
    pool[cache.flatten(0, 1).isnan().flatten(1).any(1)] = -1
    return Example((q, q_rope, pool.view(empty.shape), *rest), whole.live)


def packing(r: Draw, channels: int) -> Example:
    """Tokens 1 and 3 are padding."""
    pool = torch.zeros(4, 2, 1, packed_width(channels, 4, r.dtype), dtype=torch.int8)
    tokens = [poison(r(4, 1, width), 1, 3) for width in (channels, 4)]
    return Example((pool, *tokens, ints(5, 0, 2, 1)), lambda t: [t[0][at] for at in (1, (2, 1), 3)])


def rounding_keys(r: Draw) -> Example:
    pools = torch.zeros(4, 2, 1, 3, dtype=torch.int8), torch.full((4, 2, 1), NAN).half()
    return Example((*pools, poison(r(4, 1, 3), 1, 3), ints(5, 0, 2, 1)), lambda t: [x[at] for x in t for at in ((2, 1), (1, 0))])


def full_context(r: Draw) -> Example:
    """The last key of the last page is this step's only valid token."""
    table = ints([1, 2], [3, 4])
    return Example((r(2, 4, 4, 8), r(5, 4, 2, 8), r(5, 4, 2, 8), table, ints(7, 3), ints(1, 4), 0.4), lambda t: [t[0][0, :1], t[0][1]])


def conv(r: Draw, Q: int, taps: int, read: torch.Tensor, write: torch.Tensor, query_lens: tuple[int, ...]) -> Example:
    """With one slot a row to write the first row is a new request in an unwritten slot; the last is padding in slot 0, of no live row."""
    B, num_computed_tokens = len(query_lens), ints(4 if write.shape[1] == Q else 0, 3, 0)
    tails = [(b, slice(length, None)) for b, length in enumerate(query_lens) if write.shape[1] == 1 or not length]
    x, pool = poison(r(B, Q, 6), *tails), poison(r(9, taps - 1, 6), 0, 8)
    used = write[:2].flatten().tolist()
    return Example(
        (x, r(6, taps), pool, read, write, num_computed_tokens, ints(*query_lens), r.dtype),
        lambda t: [*(t[0][b, :n] for b, n in enumerate(query_lens)), t[1][used], t[1][7]],
    )


def delta(r: Draw, Q: int, num_computed_tokens: torch.Tensor, read: torch.Tensor, write: torch.Tensor, *query_lens: int) -> Example:
    """The last row is padding; slots 0 and 8 are unwritten."""
    B = len(query_lens)
    tokens = [r.unit(B, Q, 2, 6), r.unit(B, Q, 2, 6) * 0.9, r(B, Q, 4, 5), -r.uniform(B, Q, 4), r.uniform(B, Q, 4).to(r.dtype)]
    idle = [b for b, length in enumerate(query_lens) if not length]
    slots = poison(r(9, 4, 5, 6), 0, 8), read, write, num_computed_tokens, ints(*query_lens)
    return Example((*(poison(x, *idle) for x in tokens), *slots), defined(write, query_lens))


def chunks(
    r: Draw, Q: int, num_computed_tokens: torch.Tensor, read: torch.Tensor, write: torch.Tensor, *query_lens: int, chunk: int, Dk: int = 6
) -> Example:
    """As `delta`; beyond a row's length qkv is finite (causal_conv)."""
    B, width = len(query_lens), 2 * Dk + 2 * 5
    tails = [(b, slice(length, None)) for b, length in enumerate(query_lens)]
    tokens = r.f32(B, Q, 2, width), poison(r(B, Q, 2, 4), *tails), r.f32(4), r.f32(4)
    slots = poison(r(9, 4, 5, Dk), 0, 8), read, write, num_computed_tokens, ints(*query_lens)
    return Example((*tokens, *slots, 1e-6, chunk), defined(write, query_lens))


def defined(write: torch.Tensor, query_lens: tuple[int, ...]) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Outputs of a recurrent rule within the rows' lengths, states in slots that live tokens write, and one that nobody writes."""
    used = [slot for slots, length in zip(write.tolist(), query_lens, strict=True) for slot in slots[:length]]
    return lambda t: [*(t[0][b, :n] for b, n in enumerate(query_lens)), t[1][used], t[1][7]]


def sampling(r: Draw, V: int, levels: int) -> Example:
    """Rows: greedy, unrestricted, top_k, top_p, both, min_p, one candidate, all of them, low temperature; ties where levels are few."""
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.9, 1.0, 1.0, 2.0, 1e-6])
    top_k = ints(0, 0, 5, 0, 7, 0, 1, 9, 0)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.6, 0.8, 1.0, 1.0, 0.9, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.05, 0.0])
    logits = (r.f32(9, 20, V) * levels).round() / levels
    return Example((logits, temperature, top_k, top_p, min_p, r.uniform(9, 20)))


def verifying(r: Draw) -> Example:
    """Drafts: all right, right up to the valid ones, wrong at each position, right again after a wrong one, padding."""
    sampled = r.below(50, 7, 4)
    candidates = torch.cat([r.below(50, 7, 1), sampled[:, :-1]], 1)
    for row, place in ((2, 1), (3, 2), (4, 3), (5, 1)):
        candidates[row, place] += 1
    candidates[5, 2] += 1
    return Example((sampled, candidates, ints(4, 2, 4, 4, 4, 4, 0)))


def seating(r: Draw) -> Example:
    """Two rows of padding share the null request slot."""
    return Example((r.below(99, 7, 5), ints(4, 0, 1, 0, 6), r.below(99, 5, 5)), lambda t: [t[0][1:]])


def telling(r: Draw) -> Example:
    """Row 1 does not ask for log probabilities; its results are undefined."""
    return Example((poison(r.f32(3, 2, 31), 1), r.below(31, 3, 2), ints(1, 0, 1), 4))


def pictures(r: Draw, width: int) -> Example:
    """Segments of 7, 4 and no patches; keys and values of padding are NaN, but for the first of a segment that is padding."""
    q, k, v = r(3, 7, 2, width), *(poison(r(3, 7, 2, width), (1, slice(4, None)), (2, slice(1, None))) for _ in range(2))
    return Example((q, k, v, ints(7, 4, 0), 0.3), lambda t: [t[0][0], t[0][1, :4]])


def verify_rows(r: Draw) -> Example:
    write = ints([3, 4, 5], [6, 2, 1], [0, 0, 0])
    return delta(r, 3, ints(4, 9, 0), ints(4, 1, 0), write, 3, 2, 0)


# Operands of each primitive by case; sizes are odd where they may be.
EXAMPLES: dict[str, dict[str, Callable[[Draw], Example]]] = {
    "accept": {"drafts": verifying, "none": lambda r: Example((r.below(9, 3, 1), r.below(9, 3, 1), ints(1, 0, 1)))},
    "add_rms_norm": {"offset": lambda r: Example((r(5, 7), r(5, 7), r(7), 1e-6, 1.0))},
    "attention_heads": {"one": lambda r: heads(r, 1), "two": lambda r: heads(r, 2)},
    "slot_mapping": {
        "decode": lambda r: Example((ints(6, 0, 11), ints(2, 0, 1), ints([4, 2, 1], [0, 0, 0], [3, 5, 6]), 4, 2)),
        "end": lambda r: Example((ints(11), ints(1), ints([4, 2, 1]), 4, 3)),
    },
    "behind": {"rows": lambda r: Example((r(5, 7), ints([3], [0], [2])))},
    "cache_write": {"padding": writing},
    "causal_conv": {
        "verify": lambda r: conv(r, 2, 4, ints(6, 2, 0), ints([3, 4], [5, 6], [0, 0]), (2, 2, 0)),
        "decode": lambda r: conv(r, 1, 3, ints(6, 2, 0), ints([3], [5], [0]), (1, 1, 0)),
        "prefill": lambda r: conv(r, 7, 4, ints(8, 2, 0), ints([3], [5], [0]), (5, 2, 0)),
    },
    "chunk_gated_delta": {
        "rows": lambda r: chunks(r, 24, ints(0, 3, 0), ints(8, 2, 0), ints([3], [5], [0]), 24, 13, 0, chunk=8),
        "many chunks": lambda r: chunks(r, 320, ints(0, 3, 0), ints(8, 2, 0), ints([3], [5], [0]), 300, 77, 0, chunk=32),
        "single chunk": lambda r: chunks(r, 4, ints(0, 3, 0), ints(8, 2, 0), ints([3], [5], [0]), 4, 1, 0, chunk=4),
        "heads of one width": lambda r: chunks(r, 24, ints(0, 3, 0), ints(8, 2, 0), ints([3], [5], [0]), 24, 13, 0, chunk=8, Dk=5),
    },
    "delta_gates": {"steep": lambda r: Example((r(2, 3, 5) * 40, r(2, 3, 5), r.f32(5), r.f32(5)))},
    "delta_heads": {"heads": lambda r: Example((r(5, 3, 48), 8, 1e-6, 0.5))},
    "delta_split": {"heads": lambda r: Example((r(5, 3, 2 * 8 + 4 * 16 + 4), 8, 16, 2))},
    "embed": {"rows": lambda r: Example((r.below(11, 5), r(11, 3)))},
    "gated_delta": {
        "verify": verify_rows,
        "decode": lambda r: delta(r, 1, ints(4, 9, 0), ints(3, 5, 0), ints([3], [5], [0]), 1, 1, 0),
    },
    "gelu": {"exact": lambda r: Example((r(5, 7) * 3, False)), "tanh": lambda r: Example((r(5, 7) * 3, True))},
    "gated_rms_norm": {"heads": lambda r: Example((r(5, 3, 7), r(5, 3, 7), r(7), 1e-6))},
    "l2_norm": {"scaled": lambda r: Example((r(3, 1, 5, 7), 1e-6, 0.5)), "plain": lambda r: Example((r(2, 2, 5, 7), 1e-6, 1.0))},
    "head_linear": {"heads": lambda r: Example((r(5, 3, 7), r(3, 7, 4) / 3))},
    "mla_attention": {
        "verify": lambda r: latents(r, 3),
        "decode": lambda r: latents(r, 1),
        "prefill": lambda r: latents(r, 40),
    },
    "layer_norm": {
        "keys": lambda r: Example((r(5, 7), r(7), r(7), 1e-6)),
        "patches": lambda r: Example((r(5, 144) + 3, r(144), r(144), 1e-6)),
    },
    "paged_write": {
        "padding": lambda r: Example(
            (poison(r(4, 2, 1, 3), 0, (2, 0)), poison(r(4, 1, 3), 1, 3), ints(5, 0, 2, 1)), lambda t: [t[0][at] for at in (1, (2, 1), 3)]
        ),
    },
    "packed_latent_write": {"one tile": lambda r: packing(r, 8), "tiles": lambda r: packing(r, 256)},
    "quant_paged_write": {"padding": rounding_keys},
    "quant_sparse_attention": {"verify": lambda r: packed(r, 3), "decode": lambda r: packed(r, 1)},
    "quant_sparse_index": {"verify": lambda r: rounded_keys(r, 3), "decode": lambda r: rounded_keys(r, 1)},
    "sparse_attention": {"verify": lambda r: choosing(r, 3, "sparse_attention"), "decode": lambda r: choosing(r, 1, "sparse_attention")},
    "sparse_index": {"verify": lambda r: choosing(r, 3, "sparse_index"), "decode": lambda r: choosing(r, 1, "sparse_index")},
    "last_rows": {"rows": lambda r: Example((r(9, 5), ints(3, 0, 2)))},
    "linear": {"odd": lambda r: Example((r(5, 7), r(3, 7) / 3))},
    "paged_attention": {
        "verify": lambda r: attention(r, 3),
        "decode": lambda r: attention(r, 1),
        "prefill": lambda r: attention(r, 5),
        "full": full_context,
    },
    "picture_places": {
        "merged": lambda r: Example((ints([6, 4], [0, 0], [2, 10], [2, 2]), 24, 2, 7)),
        "single": lambda r: Example((ints([3, 5]), 15, 1, 4)),
    },
    "positions": {"rows": lambda r: Example((ints(6, 0, 11), 3))},
    "quant_cache_write": {"padding": rounding},
    "quant_paged_attention": {
        "verify": lambda r: rounded(r, 3, False),
        "decode": lambda r: rounded(r, 1, False),
        "prefill": lambda r: rounded(r, 9, False),
    },
    "static_cache_write": {"padding": rounding_by_channels},
    "static_quant_paged_attention": {
        "verify": lambda r: rounded(r, 3, True),
        "decode": lambda r: rounded(r, 1, True),
        "prefill": lambda r: rounded(r, 9, True),
    },
    "rms_norm": {
        "offset": lambda r: Example((r(5, 7), r(7), 1e-6, 1.0)),
        "heads": lambda r: Example((r(4, 2, 8), r(8), 1e-5, 0.0)),
    },
    "rope": {"partial": lambda r: rotation(r, 4), "whole": lambda r: rotation(r, 16)},
    "rope_angles": {"far": lambda r: Example((r.below(200_000, 5), 6, 1e7))},
    "scaled_rope_angles": {
        "far": lambda r: Example((r.below(200_000, 5), 64, 1e4, 40.0, 10.0, 23.0, 1.25, False)),
        "frequencies": lambda r: Example((r.below(200_000, 5), 64, 5e5, 8.0, 3e-3, 7.7e-4, 1.0, True)),
    },
    "adjust_logits": {
        "rows": lambda r: Example(
            (
                *(r.f32(3, 2, 70), r.f32(2, 2, 70), ints(1, 0, 2), ints(0, 2, 1)),
                *(ints([[-1, 5, 63], [7, -(2**31), 1]], [[0, 1, 2], [-(2**31), 0, 1]]), ints(2, 0, 1), torch.tensor([1.3, 1.0, 0.7])),
            )
        )
    },
    "mask_logits": {"rows": lambda r: Example((r(3, 2, 70), ints(*[[[-1, 5, 63], [-(2**31), 0, 1]]]), ints(1, 0, 1)))},
    "sample": {"spread": lambda r: sampling(r, 97, 1000), "ties": lambda r: sampling(r, 23, 2)},
    "request_slot_write": {"padding": seating},
    "segment_attention": {"odd": lambda r: pictures(r, 7), "tiles": lambda r: pictures(r, 16)},
    "swiglu": {"odd": lambda r: Example((r(5, 14),))},
    "swiglu_linear": {"odd": lambda r: Example((r(5, 7), r(2, 3, 7) / 3))},
    "token_logprobs": {"padding": telling},
}


ATTENTION = ["FusedInferAttentionScore"]
# Operators of each primitive in GE, beside those of single elements.
EMITS: dict[str, list[str]] = {
    "add_rms_norm": ["AddRmsNorm"],
    "cache_write": ["ScatterPaKvCache"],
    "causal_conv": ["ScatterNdUpdate"],
    "delta_heads": ["RmsNorm", "RmsNorm"],
    "gated_rms_norm": ["RmsNorm"],
    "l2_norm": ["RmsNorm"],
    "layer_norm patches": ["LayerNormV3"],
    "linear": ["MatMul"],
    "head_linear": ["BatchMatMul"],
    "paged_attention": ATTENTION,
    "mla_attention": ATTENTION,
    "quant_cache_write": ["DynamicQuant", "DynamicQuant", "ScatterPaKvCache", "ScatterNdUpdate", "ScatterNdUpdate"],
    "quant_paged_attention": ATTENTION,
    "static_cache_write": ["AscendQuantV2", "AscendQuantV2", "ScatterPaKvCache"],
    "static_quant_paged_attention": ATTENTION,
    "packed_latent_write": ["DynamicQuant", "ScatterNdUpdate"],
    "quant_paged_write": ["DynamicQuant", "ScatterNdUpdate", "ScatterNdUpdate"],
    "quant_sparse_attention": ["KvQuantSparseFlashAttention"],
    "quant_sparse_index": ["DynamicQuant", "QuantLightningIndexer"],
    "paged_write": ["ScatterNdUpdate"],
    "segment_attention": ATTENTION,
    "sparse_attention": ["SparseFlashAttention"],
    "sparse_index": ["LightningIndexer"],
    "rms_norm": ["RmsNorm"],
    "rope": ["RotaryMul"],
    "swiglu": ["SwiGlu"],
    "swiglu_linear": ["MatMul", "SwiGlu"],
}
# Batches of products, as many as chunks and parts ask for.
PRODUCTS = {"chunk_gated_delta": {"RmsNorm", "BatchMatMul", "ScatterNdUpdate"}, "gated_delta": {"BatchMatMul", "ScatterNdUpdate"}}

# Primitives of experts and of quantised weights have test files of their own.
ELSEWHERE = ("moe_", "grouped_", "quant_linear", "static_quant_linear", "weight_quant_linear")

CASES = [pytest.param(name, label, id=f"{name}-{label}") for name in EXAMPLES for label in EXAMPLES[name]]
cases = pytest.mark.parametrize(("name", "label"), CASES)


@pytest.mark.parametrize(("name", "label"), [case for case in CASES if case.values[0] in ("chunk_gated_delta", "mla_attention")])
def test_results_of_several_rows_are_contiguous(name: str, label: str) -> None:
    """Programs take views of them, as the abstract rule allows: also of rows of one chunk, or of no multiple of a part."""
    layouts: list[bool] = []
    args = EXAMPLES[name][label](Draw(torch.float32)).args

    def finish(operands: Any, results: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        layouts.extend(result.is_contiguous() for result in results)
        return tuple(results)

    with FakeTensorMode():
        lowerings.traced(TABLE[name], args, finish)
    assert all(layouts)


def test_every_primitive_with_a_lowering_of_its_own_is_here() -> None:
    own = {name for name, primitive in TABLE.items() if primitive.has("lowering:npu") and not name.startswith(ELSEWHERE)}
    assert own == set(EXAMPLES)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@cases
def test_lowering_is_the_reference(name: str, label: str, dtype: torch.dtype) -> None:
    lowerings.compare(TABLE[name], EXAMPLES[name][label](Draw(dtype)), dtype)


@pytest.fixture(scope="module")
def example_in_ge(ta: Torchair) -> Callable[[str, str], Any]:
    """An example converted in bfloat16, cached."""
    return functools.cache(lambda name, label: converted(ta, TABLE[name], EXAMPLES[name][label](Draw(torch.bfloat16)).args))


@cases
def test_lowering_converts_to_operators_that_copy_no_pool(example_in_ge: Callable[[str, str], Any], name: str, label: str) -> None:
    runner = example_in_ge(name, label)
    types = {op.type for op in runner.graph.op} - {"Const", "Data", "NetOutput"}
    assert not types & {"TensorMove", "Assign"}
    assert all(BY_TYPE[kind].run for kind in types)
    if name in PRODUCTS:
        assert set(special(runner)) == PRODUCTS[name]
    else:
        assert special(runner) == EMITS.get(f"{name} {label}", EMITS.get(name, []))


def written_by_an_operator(runner: Any) -> Iterator[int]:
    """Inputs of the graph that an operator writes in place."""
    data = {op.name: op.attr["index"].i for op in runner.graph.op if op.type == "Data"}
    for op in runner.graph.op:
        if op.type == "ScatterNdUpdate":
            yield data[op.input[0].split(":")[0]]


@pytest.mark.parametrize(("name", "label"), [case for case in CASES if TABLE[str(case.values[0])].donates])
def test_pools_are_written_where_they_are(example_in_ge: Callable[[str, str], Any], name: str, label: str) -> None:
    runner = example_in_ge(name, label)
    bound = set(runner._graph_output_ref_input.values()) | set(runner._ref_data_idx) | set(written_by_an_operator(runner))
    assert {operand for operand, _ in TABLE[name].donates} <= bound


# --- properties of single lowerings beyond their reference ---


def test_lengths_of_attention_are_operands(example_in_ge: Callable[[str, str], Any]) -> None:
    made_by = {op.name: op for op in example_in_ge("paged_attention", "verify").graph.op}
    (fused,) = (op for op in made_by.values() if op.type == "FusedInferAttentionScore")
    path = [fused]
    while path[-1].type != "Data":
        path.append(made_by[path[-1].input[6 if path[-1] is fused else 0].split(":")[0]])
    assert [op.type for op in path if op.type != "Cast"] == ["FusedInferAttentionScore", "Add", "Data"]


@pytest.mark.parametrize("features, limit", [((), "products of one chunk take at most 8"), (("cann>=8.5",), "operator takes at most 8")])
def test_more_tokens_after_each_of_which_a_state_is_kept_are_refused(features: tuple[str, ...], limit: str) -> None:
    example = delta(Draw(torch.float32), 9, ints(4, 4), ints(0, 0), ints([0] * 9, [0] * 9), 9, 9)
    with pytest.raises(PrimitiveError, match=f"has 9 tokens a row; .*{limit}"):
        gated_delta.lower_for("npu", frozenset(features))(*example.args)


def test_a_release_with_the_recurrent_operator_takes_it(ta: Torchair) -> None:
    example = EXAMPLES["gated_delta"]["verify"](Draw(torch.bfloat16))
    assert special(converted(ta, gated_delta, example.args, frozenset({"cann>=8.5"}))) == ["RecurrentGatedDeltaRule"]
    lowerings.compare(gated_delta, example, torch.bfloat16, "cann>=8.5")


@pytest.mark.parametrize("label", EXAMPLES["gated_delta"])
def test_the_delta_rule_of_vllm_ascend_is_the_reference(label: str) -> None:
    """It keeps float32 states with 16-bit values, which CANN's operator does not take."""
    example = EXAMPLES["gated_delta"][label](Draw(torch.bfloat16))
    *tokens, pool, read, write, computed, lengths = example.args
    args = (*tokens, pool.float(), read, write, computed, lengths)
    lowerings.compare(gated_delta, Example(args, example.live), torch.bfloat16, "cann>=8.5", "vllm-ascend")
    with pytest.raises(PrimitiveError, match="CANN's operator takes equal types"):
        executed(gated_delta, args, "cann>=8.5")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "features", [("aclgraph", "cann>=9.0"), ("aclgraph", "cann>=9.0", "vllm-ascend"), ("ge", "cann>=9.1")], ids="+".join
)
@pytest.mark.parametrize("label", EXAMPLES["chunk_gated_delta"])
def test_chunked_operators_are_the_reference(label: str, features: tuple[str, ...], dtype: torch.dtype) -> None:
    lowerings.compare(chunk_gated_delta, EXAMPLES["chunk_gated_delta"][label](Draw(dtype)), dtype, *features)


VLLM_EXAMPLES = [
    *(("attention_heads", "one"), ("attention_heads", "two"), ("delta_gates", "steep")),
    *(("delta_split", "heads"), ("gated_rms_norm", "heads")),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "label"), VLLM_EXAMPLES)
def test_operators_of_vllm_ascend_are_the_reference(name: str, label: str, dtype: torch.dtype) -> None:
    lowerings.compare(TABLE[name], EXAMPLES[name][label](Draw(dtype)), dtype, "aclgraph", "vllm-ascend")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_operator_of_sgl_kernel_npu_is_the_reference(dtype: torch.dtype) -> None:
    r, features = Draw(dtype), ("aclgraph", "sgl-kernel-npu", "vllm-ascend")
    lowerings.compare(ops.delta_heads, EXAMPLES["delta_heads"]["heads"](r), dtype, *features)
    with pytest.raises(PrimitiveError, match="has 5 tokens, 3 key heads, and 8 key and 31 value channels of each; legal are at most 65535"):
        executed(ops.delta_heads, (r(5, 3, 47), 8, 1e-6, 0.5), *features)
    with pytest.raises(PrimitiveError, match="has 16 channels a key head; legal are more than twice the 8 of a key"):
        executed(ops.delta_heads, (r(5, 3, 16), 8, 1e-6, 0.5), *features)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_one_window_a_request_is_a_window_for_every_token(accepted: int, dtype: torch.dtype) -> None:
    """Steps of three tokens of two requests, with either pool: the same outputs, whichever token the next step starts behind."""
    r = Draw(dtype)
    weight, slots, rest = r(32, 4), ints([3, 6, 1], [5, 2, 4]), (ints(9, 4), ints(3, 3), dtype)
    windows, rolling = poison(r(8, 3, 32), 0, 7), poison(r(8, 5, 32), 0, 7)
    for request in range(2):
        rolling[slots[request, 0], :3] = windows[slots[request, 0]]
    read = slots[:, 0]
    for _ in range(3):
        x = r(2, 3, 32)
        want, windows = reference(ops.causal_conv, (x, weight, windows, read, slots, *rest))
        args = x, weight, rolling, read, slots, *rest
        own, after = reference(ops.causal_conv, args)
        got, rolling = executed(ops.causal_conv, args, "aclgraph", "vllm-ascend")
        close([got, own], [want, want], TOLERANCE[dtype])
        close([rolling[slots[:, 0]]], [after[slots[:, 0]]], 0.0)
        read = slots[:, accepted - 1]
    prompt = (r(2, 7, 32), weight, rolling, slots[:, 0], slots[:, :1], ints(0, 4), ints(7, 5), dtype)
    want, after = reference(ops.causal_conv, prompt)
    got, pool = executed(ops.causal_conv, prompt, "aclgraph", "vllm-ascend")
    close([got[0], got[1, :5], pool[slots[:, 0]]], [want[0], want[1, :5], after[slots[:, 0]]], TOLERANCE[dtype])


def test_heads_that_a_kernel_cannot_read_are_refused() -> None:
    r = Draw(torch.bfloat16)
    with pytest.raises(PrimitiveError, match=r"has sizes \[3\]: 3 query heads a key-value head, heads of 16, 4 angles; legal are"):
        executed(TABLE["attention_heads"], (r(5, 1, 8 * 16), *EXAMPLES["attention_heads"]["one"](r).args[1:]), "aclgraph", "vllm-ascend")
    with pytest.raises(PrimitiveError, match=r"has 150 channels a key-value head, and heads of 16; legal are multiples of 32 above"):
        executed(TABLE["attention_heads"], (r(5, 1, 150), *EXAMPLES["attention_heads"]["one"](r).args[1:]), "aclgraph", "vllm-ascend")
    with pytest.raises(PrimitiveError, match=r"has \(8, 12, 2\) key channels, value channels and value heads of a key head; legal are"):
        executed(TABLE["delta_split"], (r(5, 3, 2 * 8 + 4 * 12 + 4), 8, 12, 2), "aclgraph", "vllm-ascend")
    with pytest.raises(PrimitiveError, match=r"has 85 channels a key head; legal is the sum of \[48, 32, 2, 2\]"):
        executed(TABLE["delta_split"], (r(5, 3, 85), 8, 16, 2), "aclgraph", "vllm-ascend")


def test_a_convolution_that_no_operator_takes_is_refused() -> None:
    r = Draw(torch.bfloat16)
    rest = (ints(1), ints([1, 2]), ints(3), ints(2), r.dtype)
    with pytest.raises(PrimitiveError, match="24 channels, 4 taps and 4 inputs a slot; legal are multiples of 16, 4 and 4"):
        executed(TABLE["causal_conv"], (r(1, 2, 24), r(24, 4), r(3, 4, 24), *rest), "aclgraph", "vllm-ascend")
    with pytest.raises(PrimitiveError, match="legal without operators of vllm-ascend, or in GE graphs, are 3 inputs"):
        executed(TABLE["causal_conv"], (r(1, 2, 16), r(16, 4), r(3, 4, 16), *rest), "vllm-ascend")


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_repeated_keys_keep_their_digits_over_many_chunks(noise: float) -> None:
    """Without decay, with beta 1 and equal keys, every state is a product of 512 projections."""
    qkv, ba, *rest = chunks(Draw(torch.float32), 512, ints(3, 3), ints(2, 2), ints([3], [5]), 512, 512, chunk=32).args
    qkv[..., 6:12] = qkv[:, :1, :, 6:12] + noise * qkv[..., 6:12]
    ba[..., :2], ba[..., 2:] = 1e4, -1e4
    args = (qkv, ba, *rest)
    want = chunk_gated_delta.rule("reference")(*(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    close([executed(TABLE["chunk_gated_delta"], args)[0].double()], [want[0].double()], 5e-5)


def test_a_state_passes_through_pairs_of_chunks() -> None:
    """Up to eight maps one after the other; twice the chunks are two products that pair them and one for the states between."""
    counts = []
    for Q in (1024, 2048, 4096):
        with FakeTensorMode():
            args = chunks(Draw(torch.bfloat16), Q, ints(3), ints(2), ints([3]), Q, chunk=32).args
            graph, _ = lowerings.traced(chunk_gated_delta, args, lowerings.copied_back(chunk_gated_delta))
        counts.append(sum(node.target is torch.ops.aten.bmm.default for node in graph.graph.nodes))
    assert [counts[1] - counts[0], counts[2] - counts[1]] == [3, 3]


@pytest.mark.parametrize("uniform", [0.0, 1.0])
@pytest.mark.parametrize("label", EXAMPLES["sample"])
def test_the_least_and_the_largest_draw_stay_within_what_is_kept(label: str, uniform: float) -> None:
    """Ids before the first and after the last kept one have weight zero; rounding may leave the sum of weights below 1."""
    args = EXAMPLES["sample"][label](Draw(torch.float32)).args
    args = (*args[:-1], torch.full_like(args[-1], uniform))
    want = reference(ops.sample, args)
    assert want[0][2:].unique().numel() > 9
    close(executed(TABLE["sample"], args), want, 0.0)
