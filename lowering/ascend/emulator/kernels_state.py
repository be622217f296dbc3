"""CPU kernels of the NPU's operators over state pools: KV caches and recurrent states.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ....graphs.errors import LoweringError
from .kernels_common import FLOATS, INDICES, refuse_options, require, require_shape, undefined

MASK_SIZE = 2048
MAX_TOKENS, MAX_TOKENS_VLLM = 8, 16
"""Of a sequence, in the recurrent operators of CANN and of vllm-ascend."""


@functools.cache
def causal_mask() -> torch.Tensor:
    """The compressed mask [2048, 2048] that causal attention takes for all lengths: true above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)


def _write(op: str, pool: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [T, ...] into pool [S, ...] at slots [T]; a slot that is written twice becomes undefined."""
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < pool.shape[0]:
        raise LoweringError(f"{op}: slots from {int(at.min())} to {int(at.max())} are not all in a pool of {pool.shape[0]}")
    pool[at] = rows.to(pool.dtype)
    slots, counts = at.unique(return_counts=True)
    twice = slots[counts > 1]
    pool[twice] = undefined(*pool[twice].shape, dtype=pool.dtype)


def npu_scatter_pa_kv_cache_functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """key, value [T, G, D] into copies of the caches [pages, P, G, D] at slots [T] = page * P + place; a negative slot is skipped.

    Raises:
        LoweringError: also for the default cache_mode, whose caches have another layout.
    """
    op = "npu_scatter_pa_kv_cache_functional"
    refuse_options(op, options)
    if cache_mode != "Norm":
        raise LoweringError(f"{op}: cache_mode is {cache_mode!r}; legal is 'Norm', caches of [pages, P, G, D]")
    slots = require(op, "slot_mapping", slot_mapping, INDICES, (1,)).long()
    valid = slots >= 0
    caches = []
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require(op, name, rows, (require(op, f"{name}_cache", cache, FLOATS, (4,)).dtype,), (3,))
        require_shape(op, name, rows, (slots.shape[0], *cache.shape[2:]))
        new = cache.clone(memory_format=torch.contiguous_format)
        _write(op, new.flatten(0, 1), slots[valid], rows[valid])
        caches.append(new)
    return caches[0], caches[1]


def npu_scatter_nd_update_(pool: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Writes updates [..., rest] into pool where indices [..., R] name the first R dimensions; returns the pool itself."""
    op = "npu_scatter_nd_update_"
    depth = require(op, "indices", indices, INDICES).shape[-1]
    require(op, "updates", updates, (pool.dtype,))
    require_shape(op, "updates", updates, (*indices.shape[:-1], *pool.shape[depth:]))
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for place, size in zip(indices.long().unbind(-1), pool.shape[:depth], strict=True):
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < size:
            raise LoweringError(f"{op}: indices from {int(place.min())} to {int(place.max())} are not all below the size {size}")
        flat = flat * size + place
    rows = pool.view(-1, *pool.shape[depth:])
    _write(op, rows, flat.flatten(), updates.reshape(-1, *pool.shape[depth:]))
    return pool


def npu_scatter_nd_update(pool: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """`npu_scatter_nd_update_` on a copy of the pool."""
    return npu_scatter_nd_update_(pool.clone(memory_format=torch.contiguous_format), indices, updates)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over paged caches: query i of Lq sees keys j <= i + Lkv - Lq (sparse_mode 3), or all (sparse_mode 0).

    A key that a query does not see does not affect its result, even if it is NaN.

    Args:
        query: TND [T, H, D], BSND [B, Q, H, D] or BSH [B, Q, H*D].
        key, value: caches [pages, P, G*D] or [pages, G, P, D]; query head h reads head h // (H/G).
        atten_mask: the compressed mask, `causal_mask()`; None in sparse_mode 0.
        actual_seq_lengths: int64 [B]: TND running sums of query tokens, else query tokens of each sequence (absent: all Q).
        actual_seq_lengths_kv: int64 [B] keys of each sequence.
        block_table: int32 [B, N] pages of each sequence.

    Returns:
        o like query, and f32 log of the softmax sum [T, H, 1] or [B, H, Q, 1], or [0] without softmax_lse_flag. Rows beyond a sequence and
        rows that see nothing are undefined.
    """
    op = "npu_fused_infer_attention_score"
    refuse_options(op, options, pre_tokens=2**31 - 1, next_tokens=2**31 - 1, inner_precise=1)
    if input_layout not in ("TND", "BSND", "BSH"):
        raise LoweringError(f"{op}: input_layout is {input_layout!r}; legal is 'TND', 'BSND' or 'BSH'")
    _check_mask(op, atten_mask, sparse_mode)
    tables = require(op, "block_table", block_table, (torch.int32,), (2,))
    G = num_key_value_heads or num_heads
    _check_widths(op, key, num_heads, G, input_layout)
    keys, values = _pages(op, "key", key, G, block_size), _pages(op, "value", value, G, block_size)
    flat = require(op, "query", query, (key.dtype,)).reshape(-1, num_heads, keys.shape[-1])
    out = undefined(*flat.shape[:2], values.shape[-1], dtype=query.dtype)
    lse = undefined(*flat.shape[:2], dtype=torch.float32)
    spans = _spans(op, query, actual_seq_lengths, actual_seq_lengths_kv, input_layout, tables.shape[0])
    for (low, high, length), table in zip(spans, tables, strict=True):
        if length > table.numel() * keys.shape[1]:
            raise LoweringError(f"{op}: {length} keys in a block_table row of {table.numel()} pages of {keys.shape[1]}")
        pages = table[: -(-length // keys.shape[1])].long()
        k, v = (pool[pages].flatten(0, 1)[:length].transpose(0, 1).float() for pool in (keys, values))
        _attend(flat[low:high], k, v, scale, sparse_mode == 3, out[low:high], lse[low:high])
    return out.reshape(*query.shape[:-1], -1), _lse_shape(lse, query, input_layout) if softmax_lse_flag else torch.empty(0)


# Limits of the host tiling of ops-transformer@c29bc10, for a page table and no rotary part beside the query: widths of TND in
# prompt_flash_attention_tiling.cpp (CheckInputShapeWhenLayoutIsTND); heads, groups and widths of the others there (NLIMIT, DLIMIT,
# checkPAKeyValueDimsWhenBBH) and in incre_flash_attention_tiling_check.cpp. Its page sizes (multiples of 128, for one query of 16) are left
# to the check of emitted graphs: graphs of small models have smaller pages.
_TND_WIDTHS = (64, 128, 192)
_MOST_HEADS, _LARGEST_GROUP, _WIDEST, _WIDEST_ROW = 256, 64, 512, 65535


def _check_widths(op: str, key: torch.Tensor, H: int, G: int, layout: str) -> None:
    row = key.shape[-1] if key.dim() == 3 else G * key.shape[-1]
    D = row // G
    if layout == "TND" and D not in _TND_WIDTHS:
        raise LoweringError(f"{op}: heads of width {D} in layout TND with a block_table; legal are {_TND_WIDTHS}, or layout BSH or BSND")
    if H % G or H > _MOST_HEADS or H // G > _LARGEST_GROUP or D > _WIDEST or row > _WIDEST_ROW:
        raise LoweringError(
            f"{op}: {H} query heads, {G} key heads of width {D}; legal are at most {_MOST_HEADS} heads, a multiple of the key heads, at "
            f"most {_LARGEST_GROUP} a key head, of width at most {_WIDEST}, and key rows of at most {_WIDEST_ROW}"
        )


def _pages(op: str, name: str, cache: torch.Tensor, G: int, block_size: int) -> torch.Tensor:
    """[pages, P, G, D] of either legal form."""
    require(op, name, cache, FLOATS, (3, 4))
    pages = cache.unflatten(-1, (G, -1)) if cache.dim() == 3 else cache.transpose(1, 2)
    if (pages.shape[1], pages.shape[2]) != (block_size, G):
        raise LoweringError(f"{op}: {name} {tuple(cache.shape)} against block_size {block_size} and {G} heads; legal is [pages, P, G*D]")
    return pages


def _spans(
    op: str, query: torch.Tensor, ends: torch.Tensor | None, keys: torch.Tensor | None, layout: str, B: int
) -> Iterator[tuple[int, int, int]]:
    """First and last+1 row of each sequence among the flattened queries, and its number of keys."""
    lengths = require(op, "actual_seq_lengths_kv", keys, (torch.int64,), (1,)).tolist()
    if layout == "TND":
        last = require(op, "actual_seq_lengths", ends, (torch.int64,), (1,)).tolist()
        rows = list(zip([0, *last[:-1]], last, strict=True))
        legal = last[-1] <= query.shape[0] and all(low <= high for low, high in rows)
    else:
        counts = [query.shape[1]] * B if ends is None else ends.tolist()
        rows = [(i * query.shape[1], i * query.shape[1] + n) for i, n in enumerate(counts)]
        legal = len(counts) == query.shape[0] and all(0 <= n <= query.shape[1] for n in counts)
    if not legal or len(rows) != B or len(lengths) != B:
        raise LoweringError(f"{op}: queries {tuple(query.shape)} {layout}, {B} block_table rows, query rows {rows}, key lengths {lengths}")
    return ((low, high, length) for (low, high), length in zip(rows, lengths, strict=True))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One sequence: q [Lq, H, D], k [G, Lkv, D] f32, v [G, Lkv, Dv] f32; fills the rows of out and lse that see a key."""
    Lq, Lkv, per = q.shape[0], k.shape[1], q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(per, 0), v.repeat_interleave(per, 0)
    visible = torch.ones(Lq, Lkv, dtype=torch.bool)
    visible = visible.tril(Lkv - Lq) if causal else visible
    live = visible.any(-1)
    score = (q.float().transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))[:, live]
    # 0 * NaN is NaN: sum NaN values as zeros, then mark the queries that see one.
    mean = score.softmax(-1) @ torch.where(v.isfinite(), v, 0.0)
    poisoned = visible[live].float() @ (~v.isfinite()).float() > 0
    out[live] = mean.masked_fill(poisoned, float("nan")).transpose(0, 1).to(out.dtype)
    lse[live] = score.logsumexp(-1).t()


# Masks that were found to be causal, with their version: comparing four million values takes longer than a small model's attention.
_causal: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_causal(mask: torch.Tensor) -> bool:
    if _causal.get(mask) == mask._version:
        return True
    if mask.shape != causal_mask().shape or not torch.equal(mask.bool(), causal_mask()):
        return False
    _causal[mask] = mask._version
    return True


def _check_mask(op: str, mask: torch.Tensor | None, sparse_mode: int) -> None:
    if sparse_mode == 0 and mask is None:
        return
    actual = require(op, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8), (2,))
    if sparse_mode != 3 or not _is_causal(actual):
        raise LoweringError(
            f"{op}: sparse_mode {sparse_mode}, atten_mask {tuple(actual.shape)}; legal is 0 and none, or 3 and the compressed one: "
            f"[{MASK_SIZE}, {MASK_SIZE}], true above the diagonal"
        )


def _lse_shape(lse: torch.Tensor, query: torch.Tensor, layout: str) -> torch.Tensor:
    return lse[..., None] if layout == "TND" else lse.unflatten(0, query.shape[:2]).transpose(1, 2)[..., None]


def npu_recurrent_gated_delta_rule_functional(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: `S = e^g S; d = beta (v - S k); S = S + d k'; o = S q * scale`, in float32.

    Args:
        query, key: [T, Hk, Dk], already of unit length; head j serves value heads j*r .. j*r+r-1.
        value: [T, Hv, Dv].
        state: [S, Hv, Dv, Dk] pool.
        beta: [T, Hv], default 1; g: f32 [T, Hv] log decay, default 0; scale: default Dk ** -0.5.
        actual_seq_lengths: int32 [B] tokens of each sequence, at most 8.
        ssm_state_indices: int32 [T]: the slot that the state after each token goes to.
        num_accepted_tokens: int32 [B], default 1: a sequence starts from the slot of its token number this minus one.

    Returns:
        o [T, Hv, Dv] like value, undefined beyond the sequences, and the pool with the slots replaced.
    """
    op = "npu_recurrent_gated_delta_rule_functional"
    refuse_options(op, options)
    require(op, "state", state, (value.dtype,))
    lengths = require(op, "actual_seq_lengths", actual_seq_lengths, (torch.int32,), (1,)).tolist()
    pool = state.clone(memory_format=torch.contiguous_format)
    rows = _Rows(op, query, key, value, beta, scale, ssm_state_indices, g)
    return rows.run(state, pool, 0, lengths, num_accepted_tokens, MAX_TOKENS), pool


class _Rows:
    """Tokens of sequences that lie one after the other, checked and in float32; arguments as of the operators."""

    def __init__(
        self,
        op: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        beta: torch.Tensor | None,
        scale: float | None,
        slots: torch.Tensor | None,
        g: torch.Tensor | None,
    ) -> None:
        T, Hv, _ = require(op, "value", value, FLOATS, (3,)).shape
        require_shape(op, "query", require(op, "query", query, (value.dtype,)), key.shape)
        require(op, "key", key, (value.dtype,), (3,))
        self.op, self.value, self.slots = op, value, slots
        if slots is not None:
            require_shape(op, "ssm_state_indices", require(op, "ssm_state_indices", slots, (torch.int32,), (1,)), (T,))
        self.q = query.float().repeat_interleave(Hv // query.shape[1], 1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        self.k = key.float().repeat_interleave(Hv // key.shape[1], 1)
        self.decay = torch.ones(T, Hv) if g is None else require(op, "g", g, (torch.float32,), (2,)).exp()
        self.write = torch.ones(T, Hv) if beta is None else require(op, "beta", beta, (value.dtype,), (2,)).float()

    def step(self, S: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The state [Hv, Dv, Dk] after token t, and its output [Hv, Dv]."""
        S = S * self.decay[t, :, None, None]
        delta = self.write[t, :, None] * (self.value[t].float() - (S * self.k[t, :, None]).sum(-1))
        S = S + delta[..., None] * self.k[t, :, None]
        return S, (S * self.q[t, :, None]).sum(-1)

    def run(
        self, state: torch.Tensor, pool: torch.Tensor, start: int, lengths: list[int], accepted: torch.Tensor | None, most: int
    ) -> torch.Tensor:
        """The recurrent rule from the states of `state` into those of `pool`; o [T, Hv, Dv]."""
        T, Hv, Dv = self.value.shape
        require_shape(self.op, "state", state, (state.shape[0], Hv, Dv, self.k.shape[-1]))
        slots = require(self.op, "ssm_state_indices", self.slots, (torch.int32,), (1,)).tolist()
        counts = [1] * len(lengths) if accepted is None else require(self.op, "num_accepted_tokens", accepted, INDICES).tolist()
        out = undefined(T, Hv, Dv, dtype=self.value.dtype)
        for length, count in zip(lengths, counts, strict=True):
            if not (0 < length <= most and 0 < count <= length and start + length <= T):
                raise LoweringError(f"{self.op}: {length} tokens, {count} accepted, from row {start} of {T}; legal is up to {most}")
            S = state[slots[start + count - 1]].float()
            for t in range(start, start + length):
                S, o = self.step(S, t)
                out[t] = o.to(out.dtype)
                pool[slots[t]] = S.to(pool.dtype)
            start += length
        return out


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """vllm-ascend's recurrent rule: as `npu_recurrent_gated_delta_rule_functional`, writing the pool itself.

    Source: vllm-project/vllm-ascend@182b75e csrc/attention/recurrent_gated_delta_rule.

    Args:
        state: of the dtype of value, or float32.
        scale: must be given.
        actual_seq_lengths: int32 [B + 1]: the first row of the first sequence, then the tokens of each, at most 16.
    """
    op = "_C_ascend.npu_recurrent_gated_delta_rule"
    refuse_options(op, options)
    require(op, "state", state, (value.dtype, torch.float32))
    start, *lengths = require(op, "actual_seq_lengths", actual_seq_lengths, (torch.int32,), (1,)).tolist()
    if scale is None:
        raise LoweringError(f"{op}: scale is absent; legal is a number")
    rows = _Rows(op, query, key, value, beta, scale, ssm_state_indices, g)
    return rows.run(state.clone(), state, start, lengths, num_accepted_tokens, MAX_TOKENS_VLLM)


def npu_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of whole sequences; query, key, value, beta, g as of the recurrent operators.

    Source: Ascend/op-plugin@517f2e7 docs/zh/custom_APIs/torch_npu/torch_npu-npu_chunk_gated_delta_rule.md.

    Args:
        initial_state: [B, Hv, Dv, Dk], of the dtype of value; heads of up to 128, at most 64.
        actual_seq_lengths: int32 [B] tokens of each sequence, all tokens together.
        scale: default 1.

    Returns:
        o [T, Hv, Dv] and the states after the sequences [B, Hv, Dv, Dk], of the dtype of value.
    """
    op = "npu_chunk_gated_delta_rule"
    T, Hv, Dv = value.shape
    states = require(op, "initial_state", initial_state, (value.dtype,), (4,))
    require(op, "beta", beta, (value.dtype,), (2,))
    lengths = require(op, "actual_seq_lengths", actual_seq_lengths, (torch.int32,), (1,)).tolist()
    rows = _Rows(op, query, key, value, beta, 1.0 if scale is None else scale, None, g)
    require_shape(op, "initial_state", states, (len(lengths), Hv, Dv, key.shape[-1]))
    if sum(lengths) != T or min(lengths) < 1 or max(Dv, key.shape[-1]) > 128 or max(Hv, key.shape[1]) > 64:
        raise LoweringError(
            f"{op}: {lengths} tokens of {T}, {key.shape[1]} and {Hv} heads of {key.shape[-1]} and {Dv}; "
            "legal are all tokens, up to 64 heads of up to 128"
        )
    outs, after = [], list(states.float())
    for t, sequence in enumerate(itertools.chain.from_iterable([i] * length for i, length in enumerate(lengths))):
        after[sequence], o = rows.step(after[sequence], t)
        outs.append(o)
    return torch.stack(outs).to(value.dtype), torch.stack(after).to(value.dtype)
