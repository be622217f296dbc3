"""The last valid row of each request of a prefill."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class LastRows(NamedTuple):
    """Operands of `last_rows`."""

    x: Tensor  # [T, M] with T = B * Q
    lengths: Tensor  # [B] valid tokens


last_rows = Primitive("last_rows", LastRows, factors="_ m, _ -> _ m")


@last_rows.abstract
def _abstract(args: LastRows) -> Tensor:
    x, lengths = args
    return torch.empty((lengths.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)


@last_rows.reference
def last_rows_reference(args: LastRows) -> Tensor:
    """`x[b * Q + lengths[b] - 1]`; a row without valid tokens gives its first.

    Returns:
        [B, M].
    """
    x, lengths = args
    B = lengths.shape[0]
    first = torch.arange(B, dtype=torch.int32, device=x.device) * (x.shape[0] // B)
    return x.index_select(0, first + (lengths - 1).clamp(min=0))


last_rows.lowering("ge")(last_rows_reference)


@last_rows.cost
def _cost(args: LastRows) -> Cost:
    x, lengths = args
    moved = lengths.shape[0] * x.shape[1] * x.dtype.itemsize
    return Cost(0, moved + nbytes(lengths), moved)
