"""Rows of the embedding table, by token id."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Embed(NamedTuple):
    """Operands of `embed`."""

    tokens: Tensor  # [T] integer ids in [0, V)
    table: Tensor  # [V, M]


embed = Primitive("embed", Embed, factors="t, _ m -> t m")


@embed.abstract
def _abstract(args: Embed) -> Tensor:
    tokens, table = args
    return torch.empty((tokens.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)


@embed.reference
def embed_reference(args: Embed) -> Tensor:
    """`table[tokens]`.

    Returns:
        [T, M].
    """
    return torch.nn.functional.embedding(args.tokens, args.table)


@embed.lowering("npu")
def _npu(args: Embed) -> Any:
    return torch.ops.aten.embedding(args.table, args.tokens)


@embed.cost
def _cost(args: Embed) -> Cost:
    tokens, table = args
    moved = tokens.shape[0] * table.shape[1] * table.dtype.itemsize
    return Cost(0, moved + nbytes(tokens), moved)
