"""Rows of the embedding table, by token id."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import PANELS, Native, Packed
from ..primitive import Cost, Primitive, nbytes


class Embed(NamedTuple):
    """Operands of `embed`."""

    tokens: Tensor  # [T] integer ids in [0, V)
    table: Tensor  # [V, M]


embed = Primitive("embed", Embed, factors="t, _ m -> t m", like="table")


@embed.reference
def embed_reference(args: Embed) -> Tensor:
    """`table[tokens]`.

    Returns:
        [T, M].
    """
    return torch.nn.functional.embedding(args.tokens, args.table)


_panels = {
    dtype: Native(f"npuc_embed_{kind}", embed.schema, embed.rule("abstract"), Packed((1,), kind, embed.rule("reference"), worth=False)).op
    for dtype, kind in PANELS.items()
}


@embed.lowering("inductor")
def embed_on_cpu(args: Embed) -> Any:
    """A table that is the output head, too, is packed for it; rows are then picked out of its panels (lowering/cpp/linear.cpp)."""
    panels = _panels.get(args.table.dtype)
    return panels(args.tokens, args.table) if panels else embed_reference(args)


@embed.lowering("npu")
def _npu(args: Embed) -> Any:
    return torch.ops.aten.embedding(args.table, args.tokens)


@embed.cost
def _cost(args: Embed) -> Cost:
    tokens, table = args
    moved = tokens.shape[0] * table.shape[1] * table.dtype.itemsize
    return Cost(0, moved + nbytes(tokens), moved)
