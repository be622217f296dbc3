"""Keys of the indexer of a sparse attention as a layer caches them: as floats, or as int8 with a scale a token."""

from __future__ import annotations

from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree
from .batch import Queries
from .params import Param, Source
from .quant.formats import INT8
from .variant import Variant


class IndexSizes(Protocol):
    """Fields of a model's configuration that are read."""

    @property
    def index_head_dim(self) -> int: ...
    @property
    def variant(self) -> Variant: ...


def rounded(cfg: IndexSizes, prefix: str) -> bool:
    """Whether the indexer whose layer's tensors' names begin with `prefix` caches int8."""
    return cfg.variant.formats.of_cache(f"{prefix}indexer") == INT8


def params(cfg: IndexSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """`index_rotation` of an indexer that caches int8: queries and keys are rotated alike, which changes no score and spreads large
    channels over all (as int8 indexers of DeepSeek V3.2 and GLM-5 do: attention/sfa_v1.py of vllm-project/vllm-ascend, 182b75e)."""
    if not rounded(cfg, prefix):
        return {}
    D = cfg.index_head_dim
    return {"index_rotation": Param(Aval((D, D), dtype), Source((), (), lambda: rotation(D).to(dtype), lambda x: ()))}


def rotation(width: int) -> torch.Tensor:
    """A Hadamard matrix over the square root of its size, symmetric and its own inverse, along the diagonal as often as it fits."""
    size = width & -width
    numbers = torch.arange(size)
    common = numbers[:, None] & numbers
    odd = sum((common >> bit) & 1 for bit in range(size.bit_length())) % 2
    return torch.kron(torch.eye(width // size), (1.0 - 2.0 * odd) * size**-0.5)


def state(cfg: IndexSizes, limits: Limits, dtype: torch.dtype, prefix: str) -> dict[str, Aval]:
    """Pools of one layer, whole on every device: keys [pages, P, 1, D], and where they are int8 scales [pages, P, 1]."""
    pages, axes, D = (limits.num_pages, limits.page_size, 1), ("pages", None, None), cfg.index_head_dim
    if not rounded(cfg, prefix):
        return {"index": Aval((*pages, D), dtype, (*axes, None))}
    return {"index": Aval((*pages, D), torch.int8, (*axes, None)), "index_scale": Aval(pages, torch.float16, axes)}


def write(weights: Tree, state: Tree, key: torch.Tensor, slots: torch.Tensor) -> Tree:
    """The state with keys [T, 1, D] written to it."""
    if "index_scale" not in state:
        return {**state, "index": ops.paged_write(state["index"], key, slots)}
    rotated = ops.linear(key[:, 0], weights["index_rotation"])[:, None]
    index, scale = ops.quant_paged_write(state["index"], state["index_scale"], rotated, slots)
    return {**state, "index": index, "index_scale": scale}


def choose(weights: Tree, state: Tree, rows: Queries, query: torch.Tensor, shares: torch.Tensor, most: int) -> torch.Tensor:
    """The keys [B, Q, most] with the best scores of queries [B, Q, I, D] whose heads weigh `shares` [B, Q, I]."""
    place = (rows.page_table, rows.num_computed_tokens, rows.query_lens, most)
    chosen: torch.Tensor
    if "index_scale" in state:
        rotated = ops.linear(query.reshape(-1, query.shape[-1]), weights["index_rotation"]).view(query.shape)
        chosen = ops.quant_sparse_index(rotated, shares, state["index"], state["index_scale"], *place)
    else:
        chosen = ops.sparse_index(query, shares, state["index"], *place)
    return chosen
