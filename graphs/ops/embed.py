"""Turns token ids into rows of the embedding table."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

embed = Primitive("embed", "(Tensor tokens, Tensor table) -> Tensor", factors="t, _ m -> t m")


@embed.abstract
def _abstract(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.empty((tokens.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)


@embed.reference
def embed_reference(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`table[tokens]`.

    Args:
        tokens: [T] integer ids in [0, V).
        table: [V, M].

    Returns:
        [T, M].
    """
    return torch.nn.functional.embedding(tokens, table)


@embed.lowering("ge")
def _npu(tokens: torch.Tensor, table: torch.Tensor) -> Any:
    return torch.ops.aten.embedding(table, tokens)


@embed.cost
def _cost(tokens: torch.Tensor, table: torch.Tensor) -> Cost:
    moved = tokens.shape[0] * table.shape[1] * table.dtype.itemsize
    return Cost(0, moved + nbytes(tokens), moved)
