"""CPU kernels of operators in the form that torch_npu runs outside GE: pools written in place, lengths as lists of the host.

Signatures: torch_npu 2.13.0. Each is its functional form (kernels_state.py) with the new pools written into the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import kernels_attention as attention
from . import kernels_state as functional

Lengths = Sequence[int] | torch.Tensor | None
"""A list of the host; a tensor where all ranks are emulated in one process and nobody reads it back (tools/prove)."""


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **options: Any,
) -> tuple[()]:
    """Writes key, value [T, G, D] into the caches [pages, P, G, D] at slots [T]."""
    written = functional.npu_scatter_pa_kv_cache_functional(key, value, key_cache, value_cache, slot_mapping, **options)
    key_cache.copy_(written[0])
    value_cache.copy_(written[1])
    return ()


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor, **options: Any
) -> torch.Tensor:
    """o [T, Hv, Dv]; writes the states after each token into the pool [S, Hv, Dv, Dk]."""
    out, written = functional.npu_recurrent_gated_delta_rule_functional(query, key, value, state, **options)
    state.copy_(written)
    return out


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over paged caches, see `kernels_attention.npu_fused_infer_attention_score`, which takes its lengths as tensors."""
    return attention.npu_fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=_tensor(actual_seq_lengths),
        actual_seq_lengths_kv=_tensor(actual_seq_lengths_kv),
        **options,
    )


def _tensor(lengths: Lengths) -> torch.Tensor | None:
    return torch.tensor(lengths, dtype=torch.int64) if isinstance(lengths, list | tuple) else lengths  # type: ignore[return-value]
