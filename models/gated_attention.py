"""The gated full-attention layer: parameters, paged key-value pools and functions."""

from __future__ import annotations

from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree
from . import quant, sequence_parallel
from .batch import Batch
from .params import Param, Source
from .variant import Variant


class AttentionSizes(Protocol):
    """Fields of a model's configuration that the layer reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def variant(self) -> Variant: ...


def params(cfg: AttentionSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of one layer; `prefix` begins their names in a checkpoint. Query rows are q then gate, head by head."""
    M, H, G, D = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    copies, quantise = cfg.variant.kv_repeat, quant.LINEAR[cfg.variant.attention]

    def join(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # By head: its keys, then its values.
        heads = torch.stack([k.view(-1, D, M), v.view(-1, D, M)], 1)
        return heads.repeat_interleave(copies, 0).reshape(-1, M)

    def split(kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.reshape(G * D, M) for part in kv.view(G, copies, 2, D, M)[:, 0].unbind(1))

    q = Param(Aval((2 * H * D, M), dtype, ("q_heads", None)), Source((prefix + "q_proj.weight",), ((2 * H * D, M),)))
    # Ranks that share a head read it whole.
    heads = ("kv_heads" if copies == 1 else None, None)
    kv_source = Source((prefix + "k_proj.weight", prefix + "v_proj.weight"), ((G * D, M),) * 2, join, split, (heads,) * 2)
    return {
        "q": quantise(q),
        "kv": quantise(Param(Aval((2 * G * copies * D, M), dtype, ("kv_heads", None)), kv_source)),
        "q_norm": Param(Aval((D,), dtype), Source((prefix + "q_norm.weight",), ((D,),)), "zeros"),
        "k_norm": Param(Aval((D,), dtype), Source((prefix + "k_norm.weight",), ((D,),)), "zeros"),
        "out": Param(Aval((M, H * D), dtype, (None, "q_heads")), Source((prefix + "o_proj.weight",), ((M, H * D),))),
    }


def state(cfg: AttentionSizes, limits: Limits, dtype: torch.dtype) -> dict[str, Aval]:
    """Pools of one layer: keys and values, each [pages, P, G, D]; G counts the copies of `Variant.kv_repeat`."""
    shape = (limits.num_pages, limits.page_size, cfg.num_key_value_heads * cfg.variant.kv_repeat, cfg.head_dim)
    pool = Aval(shape, dtype, ("pages", None, "kv_heads", None))
    return {"k": pool, "v": pool}


def apply(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Attention whose output is gated, head by head, by a sigmoid of its own projection (arXiv:2505.06708).

    Args:
        x: [T, M] normalised input, padding rows included, laid out as the residual stream (sequence_parallel.py).

    Returns:
        the layer's output before the residual add, shaped and laid out like x, and the new state.
    """
    x = sequence_parallel.whole(x, batch.size * batch.q_len)
    state = write_kv(cfg, weights, state, batch, x)
    return attend(cfg, weights, state, batch, x), state


def write_kv(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> Tree:
    """The state with the keys and values of x written to it.

    Args:
        x: [T, M] normalised input; every device of the group has all of it.
    """
    G, D = cfg.num_key_value_heads * cfg.variant.kv_repeat, cfg.head_dim
    k, v = quant.linear(x, weights["kv"]).view(-1, G, 2 * D).split(D, -1)
    k = ops.rope(_head_norm(k, weights["k_norm"], cfg.rms_norm_eps), batch.cos, batch.sin)
    slots = ops.slot_mapping(batch.num_computed_tokens, batch.query_lens, batch.page_table, state["k"].shape[1], batch.q_len)
    k_cache, v_cache = ops.cache_write(state["k"], state["v"], k, v.contiguous(), slots)
    return {"k": k_cache, "v": v_cache}


def attend(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Attention of x over a state that holds the keys and values of x already, before the residual add.

    Args:
        x: [T, M] normalised input; every device of the group has all of it.

    Returns:
        [T, M], laid out as the residual stream.
    """
    H, D = cfg.num_attention_heads, cfg.head_dim
    q, gate = quant.linear(x, weights["q"]).view(-1, H, 2 * D).split(D, -1)
    q = ops.rope(_head_norm(q, weights["q_norm"], cfg.rms_norm_eps), batch.cos, batch.sin).view(batch.size, batch.q_len, H, D)
    out = ops.paged_attention(q, state["k"], state["v"], batch.page_table, batch.num_computed_tokens, batch.query_lens, D**-0.5)
    return sequence_parallel.project(out.view(-1, H * D) * torch.sigmoid(gate.reshape(-1, H * D)), weights["out"])


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head of x [T, H, D], zero-centred weight [D]."""
    normed: torch.Tensor = ops.rms_norm(x, weight, eps, 1.0)
    return normed
