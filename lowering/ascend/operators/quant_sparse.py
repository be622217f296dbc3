"""CPU kernels of the NPU's attention over chosen keys of int8: the indexer over rounded keys, and the attention over packed latents.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.ops.packed_latents import packed_width, unpacked
from . import value_rules as values
from .call import form
from .checks import refuse_options, require, require_shape
from .record import NpuOperator, TorchForm
from .sparse import LAST, best_of_rows, check_attention, check_chosen, check_layout, index_work, mixed_rows, rows_of, sparse_work

_MOST_CHOSEN, _MOST_HEADS = 2048, 64


def npu_quant_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **options: Any,
) -> torch.Tensor:
    """As `npu_lightning_indexer`, of int8 [B, Q, I, D] and [pages, P, 1, D] with float16 scales [B, Q, I] and [pages, P, 1].

    Weights times the scales of queries are rounded to float16.

    Returns:
        int32 [B, Q, 1, sparse_count], -1 behind the keys that a query sees.
    """
    op, half = "npu_quant_lightning_indexer", (torch.float16,)
    refuse_options(op, options, pre_tokens=LAST, next_tokens=LAST)
    check_layout(op, layout_query, layout_key, sparse_mode)
    B, Q, heads, D = require(op, "query", query, (torch.int8,), (4,)).shape
    require_shape(op, "key", require(op, "key", key, (torch.int8,), (4,)), (*key.shape[:2], 1, D))
    require_shape(op, "weights", require(op, "weights", weights, half), (B, Q, heads))
    require_shape(op, "query_dequant_scale", require(op, "query_dequant_scale", query_dequant_scale, half), (B, Q, heads))
    require_shape(op, "key_dequant_scale", require(op, "key_dequant_scale", key_dequant_scale, half), key.shape[:3])
    if query_quant_mode or key_quant_mode or heads > _MOST_HEADS or not 0 < sparse_count <= _MOST_CHOSEN:
        raise LoweringError(
            f"{op}: quantisation modes {query_quant_mode} and {key_quant_mode}, {heads} heads, sparse_count {sparse_count}; legal are 0 "
            f"and 0, up to {_MOST_HEADS}, and 1 to {_MOST_CHOSEN}"
        )
    indices = torch.full((B, Q, 1, sparse_count), -1, dtype=torch.int32)
    for b, (new, length, pages) in enumerate(rows_of(op, Q, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table)):
        keys, scales = key[pages].flatten(0, 2)[:length].float(), key_dequant_scale[pages].flatten()[:length].float()
        shares = (weights[b, :new] * query_dequant_scale[b, :new]).float().contiguous()
        scores = torch.einsum("tid,kd->tik", query[b, :new].float().contiguous(), keys).relu()
        best_of_rows(indices[b, :new, 0], torch.einsum("ti,tik->tk", shares, scores) * scales, length - new)
    return indices


def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    **options: Any,
) -> torch.Tensor:
    """As `npu_sparse_flash_attention`, over rows of bytes: int8 latents, the rotary part in the dtype of queries, a float32 scale a tile.

    Args:
        query: [B, Q, H, L + R].
        key: cache [pages, P, 1, W] of int8, which are the values too.
        sparse_indices: int32 [B, Q, 1, K], -1 behind the chosen positions.

    Returns:
        o [B, Q, H, L], undefined where a query sees nothing.
    """
    op = "npu_kv_quant_sparse_flash_attention"
    refuse_options(op, options, pre_tokens=LAST, next_tokens=LAST)
    check_layout(op, layout_query, layout_kv, sparse_mode)
    B, Q, H, width = query.shape
    L, R = width - rope_head_dim, rope_head_dim
    require(op, "key", key, (torch.int8,), (4,))
    require_shape(op, "key", key, (*key.shape[:2], 1, packed_width(L, R, query.dtype)))
    check_chosen(op, sparse_indices, B, Q)
    check_attention(op, attention_mode, sparse_block_size, H, key, value)
    if (key_quant_mode, value_quant_mode, quant_scale_repo_mode) != (2, 2, 1) or L % tile_size:
        raise LoweringError(
            f"{op}: quantisation modes {key_quant_mode}, {value_quant_mode} and {quant_scale_repo_mode}, {L} channels in tiles of "
            f"{tile_size}; legal are 2, 2, 1 and whole tiles"
        )

    def entries(pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents, rotary = unpacked(key[pages].flatten(0, 2)[:length], L, query.dtype)
        return latents.float(), rotary.float()

    counted = rows_of(op, Q, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    return mixed_rows(query, L, entries, sparse_indices, counted, scale_value)


OPERATORS = (
    NpuOperator(
        ("QuantLightningIndexer",),
        torch=(TorchForm("npu.npu_quant_lightning_indexer.default", npu_quant_lightning_indexer, values=values.rounded_indexed_keys),),
        run=form(
            npu_quant_lightning_indexer,
            "query key weights query_dequant_scale key_dequant_scale",
            "actual_seq_lengths_query actual_seq_lengths_key block_table",
            attributes={
                "query_quant_mode": None,
                "key_quant_mode": None,
                "layout_query": "BSND",
                "layout_key": "BSND",
                "sparse_count": 2048,
                "sparse_mode": 3,
            },
            legal={"pre_tokens": LAST, "next_tokens": LAST},
        ),
        widens=True,
        work=index_work,
    ),
    NpuOperator(
        ("KvQuantSparseFlashAttention",),
        torch=(
            TorchForm(
                "npu.npu_kv_quant_sparse_flash_attention.default",
                npu_kv_quant_sparse_flash_attention,
                index=values.Index("sparse_indices", values.keys_of_pages, least=-1),
            ),
        ),
        run=form(
            npu_kv_quant_sparse_flash_attention,
            "query key value sparse_indices",
            "block_table actual_seq_lengths_query actual_seq_lengths_kv",
            attributes={
                "scale_value": None,
                "key_quant_mode": None,
                "value_quant_mode": None,
                "sparse_block_size": 1,
                "layout_query": "BSND",
                "layout_kv": "BSND",
                "sparse_mode": 3,
                "attention_mode": 0,
                "quant_scale_repo_mode": 1,
                "tile_size": 128,
                "rope_head_dim": 64,
            },
            legal={"pre_tokens": LAST, "next_tokens": LAST},
        ),
        widens=True,
        work=sparse_work,
    ),
)
