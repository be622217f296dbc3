"""Operators over state pools: writes of KV caches, and recurrent states.

Semantics of the kernels: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import trials, type_rules, work
from .call import Call, Results, form
from .checks import FLOATS, INDICES, refuse_options, require, require_shape, undefined
from .node import Node
from .record import NpuOperator, TorchForm
from .state_rules import chunked_delta_rule_sizes, delta_rule_sizes
from .value_rules import Index, val_of
from .value_rules import rows as rows_of

MAX_TOKENS, MAX_TOKENS_VLLM = 8, 16
"""Of a sequence, in the recurrent operators of CANN and of vllm-ascend."""


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
        require(op, name, rows, (require(op, f"{name}_cache", cache, (*FLOATS, torch.int8), (4,)).dtype,), (3,))
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


def vllm_recurrent_gated_delta_rule(
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


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **options: Any,
) -> tuple[()]:
    """Writes key, value [T, G, D] into the caches [pages, P, G, D] at slots [T]."""
    written = npu_scatter_pa_kv_cache_functional(key, value, key_cache, value_cache, slot_mapping, **options)
    key_cache.copy_(written[0])
    value_cache.copy_(written[1])
    return ()


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor, **options: Any
) -> torch.Tensor:
    """o [T, Hv, Dv]; writes the states after each token into the pool [S, Hv, Dv, Dk]."""
    out, written = npu_recurrent_gated_delta_rule_functional(query, key, value, state, **options)
    state.copy_(written)
    return out


def _scatter_nd_update(call: Call) -> Results:
    call.ignore("use_locking")
    return npu_scatter_nd_update(call.tensor("var"), call.tensor("indices"), call.tensor("updates"))


def _recurrent_gated_delta_rule(call: Call) -> Results:
    query, key, value, pool = map(call.tensor, ("query", "key", "value", "state"))
    names = ("beta", "actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens", "g")
    options: dict[str, Any] = {name: call.optional(name) for name in names} | {"scale": call.attr("scale_value", 1.0)}
    lengths = options["actual_seq_lengths"]
    # vllm-ascend's operator has the same type; its lengths begin with the first row, 0, which is no length that CANN's takes.
    if lengths is None or lengths[0] != 0:
        return npu_recurrent_gated_delta_rule_functional(query, key, value, pool, **options)
    pool = pool.clone()
    return vllm_recurrent_gated_delta_rule(query, key, value, pool, **options), pool


def _convert_recurrent_gated_delta_rule(ta: Any, earlier: Any) -> Any:
    """vllm-ascend's operator has the type of CANN's in GE, and stands in for it wherever the package is installed.

    Source: vllm-project/vllm-ascend@182b75e csrc/attention/recurrent_gated_delta_rule/op_host/recurrent_gated_delta_rule_def.cpp.
    """

    def convert(query: Any, key: Any, value: Any, state: Any, *, beta: Any = None, scale: float | None = None, **rest: Any) -> Any:
        rest.pop("meta_outputs", None)
        lengths, slots = rest.pop("actual_seq_lengths"), rest.pop("ssm_state_indices")
        return ta.ge.RecurrentGatedDeltaRule(query, key, value, beta, state, lengths, slots, scale=scale, **rest)[0]

    return convert


def _convert_chunk_gated_delta_rule(ta: Any, earlier: Any) -> Any:
    """By the operator's definition: the converter of torch_npu 2.13.0 raises, although CANN defines it for graphs as for calls.

    Source: hicann/ops-transformer@7f27c36 attention/chunk_gated_delta_rule/op_host/chunk_gated_delta_rule_def.cpp; torchair converts it so
    from Ascend/torchair@fced884 on.
    """
    ir, attr, kind = ta.torchair._ge_concrete_graph.compat_ir, ta.torchair.ge.attr, "ChunkGatedDeltaRule"
    dtypes = {name: "DT_BF16" for name in ("query", "key", "value", "beta")}
    dtypes |= {"initial_state": "DT_BF16, DT_FLOAT", "actual_seq_lengths": "DT_INT32"}
    definition = ir.IrDef(kind)
    for name, dtype in dtypes.items():
        definition = definition.input(name, dtype)
    definition = definition.optional_input("g", "DT_FLOAT").attr("scale_value", attr.Float(1.0))
    definition = definition.output("out", "DT_BF16").output("final_state", "DT_BF16, DT_FLOAT")

    def convert(
        query: Any, key: Any, value: Any, *, scale: float | None = None, g: Any = None, meta_outputs: Any = None, **rest: Any
    ) -> Any:
        return ir.ge_op(
            op_type=kind,
            inputs={"query": query, "key": key, "value": value} | {name: rest.get(name) for name in [*dtypes][3:]} | {"g": g},
            attrs={"scale_value": attr.Float(1.0 if scale is None else scale)},
            outputs=["out", "final_state"],
            ir=definition,
        )

    return convert


def _delta_rule_work(op: Node, facts: work.Facts) -> work.Work:
    """Reads a state a request and writes a state a token."""
    value, state = facts.types[op.tensor("value")], facts.types[op.tensor("state")]
    batch, tokens = facts.types[op.tensor("actual_seq_lengths")].shape[0], value.shape[0]
    one = state.nbytes / state.shape[0]
    plain = [tensor for tensor in (*op.reads, f"{op.name}:0") if tensor != op.tensor("state")]
    moved = work.bytes_moved(facts, work.whole_tensors(facts, plain))
    return replace(moved, streamed_bytes=one * (batch + tokens), vector_ops=6.0 * tokens * state.elements / state.shape[0])


def _chunked_rule_work(op: Node, facts: work.Facts) -> work.Work:
    """Products within chunks of 64 tokens, the inverse of a chunk's triangle not counted, and of states with them (arXiv:2412.06464)."""
    value, key = facts.types[op.tensor("value")], facts.types[op.tensor("key")]
    (tokens, heads, Dv), Dk = value.shape, key.shape[-1]
    ops = 2.0 * tokens * heads * (2 * _CHUNK * (Dk + Dv) + 3 * Dk * Dv)
    return replace(work.generic(op, facts), bf16_ops=ops)


_CHUNK = 64
"""Tokens of a chunk of the chunked rule: assumed."""

_SLOTS = Index("slot_mapping", rows_of("key_cache", 2))
_STATES = Index("ssm_state_indices", rows_of("state"))
_PLACES = Index("indices", lambda given: max(val_of(given["input"]).shape[: val_of(given["indices"]).shape[-1]]))

OPERATORS = (
    NpuOperator(
        ("ScatterPaKvCache",),
        torch=(
            TorchForm(
                "npu.npu_scatter_pa_kv_cache_functional.default",
                npu_scatter_pa_kv_cache_functional,
                index=_SLOTS,
                in_place="npu.npu_scatter_pa_kv_cache.default",
                pools={0: 2, 1: 3},
            ),
            TorchForm("npu.npu_scatter_pa_kv_cache.default", npu_scatter_pa_kv_cache, index=_SLOTS),
        ),
        run=form(
            npu_scatter_pa_kv_cache_functional,
            "key value key_cache value_cache slot_mapping",
            attributes={"cache_mode": "Norm"},
            legal={"scatter_mode": "None", "strides": [1, 1], "offsets": [0, 0]},
        ),
        widens=True,
        writes={0: 1, 1: 4},
        trial=trials.Trial(2, "kv-writes", indices={"slot_mapping": trials.pool_rows}),
    ),
    NpuOperator(
        ("ScatterNdUpdate",),
        torch=(
            TorchForm("npu.npu_scatter_nd_update.default", npu_scatter_nd_update, index=_PLACES),
            TorchForm("npu.npu_scatter_nd_update_.default", npu_scatter_nd_update_, index=_PLACES),
        ),
        run=_scatter_nd_update,
        types=type_rules.same,
        writes={0: 0},
        trial=trials.Trial(3, "kv-writes", indices={"indices": trials.pool_rows}),
    ),
    NpuOperator(
        ("RecurrentGatedDeltaRule",),
        torch=(
            TorchForm(
                "npu.npu_recurrent_gated_delta_rule_functional.default",
                npu_recurrent_gated_delta_rule_functional,
                index=_STATES,
                in_place="npu.npu_recurrent_gated_delta_rule.default",
                pools={1: 3},
                one_result=True,
            ),
            TorchForm("npu.npu_recurrent_gated_delta_rule.default", npu_recurrent_gated_delta_rule, index=_STATES),
            TorchForm("_C_ascend.npu_recurrent_gated_delta_rule.default", vllm_recurrent_gated_delta_rule, index=_STATES),
        ),
        converters={"_C_ascend.npu_recurrent_gated_delta_rule.default": _convert_recurrent_gated_delta_rule},
        run=_recurrent_gated_delta_rule,
        widens=True,
        work=_delta_rule_work,
        rules=(delta_rule_sizes,),
        writes={1: 4},
        trial=trials.Trial(1, "delta-rule", "delta-rule", layer="delta-rule", floats=trials.delta_rule_floats, corners=trials.first_tokens),
    ),
    NpuOperator(
        ("ChunkGatedDeltaRule",),
        torch=(TorchForm("npu.npu_chunk_gated_delta_rule.default", npu_chunk_gated_delta_rule),),
        converters={"npu.npu_chunk_gated_delta_rule.default": _convert_chunk_gated_delta_rule},
        run=form(
            npu_chunk_gated_delta_rule,
            "query key value",
            "beta initial_state actual_seq_lengths g",
            attributes={"scale_value=scale": 1.0},
        ),
        widens=True,
        all_cores=True,
        work=_chunked_rule_work,
        rules=(chunked_delta_rule_sizes,),
        trial=trials.Trial(12, "delta-rule-prefill", layer="delta-rule-prefill", floats=trials.delta_rule_floats),
    ),
    # No lowering emits these; torchair's passes know them as operators that write in place, and so must all who read graphs.
    NpuOperator(("Scatter",), writes={0: 0}),
    NpuOperator(("QuantUpdateScatter",), writes={0: 0}),
    NpuOperator(("KvRmsNormRopeCache",), writes={0: 5, 1: 6}),
    NpuOperator(("QkvRmsNormRopeCache",), writes={0: 6, 1: 7, 2: 8}),
    NpuOperator(("MlaPrologV3",), writes={2: 9, 3: 10}),
    NpuOperator(("GatherSelectionKvCache",), writes={0: 0, 1: 1, 2: 2, 3: 3}),
)
