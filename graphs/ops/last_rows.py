"""The last valid row of each request of a prefill."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class LastRows(NamedTuple):
    """Operands of `last_rows`."""

    x: Tensor  # [T, M] with T = B * Q
    query_lens: Tensor  # [B] valid tokens


last_rows = Primitive("last_rows", LastRows, factors="_ m, _ -> _ m")


@last_rows.abstract
def _abstract(args: LastRows) -> Tensor:
    x, query_lens = args
    return torch.empty((query_lens.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)


@last_rows.reference
def last_rows_reference(args: LastRows) -> Tensor:
    """`x[b * Q + query_lens[b] - 1]`; a row without valid tokens gives its first.

    Returns:
        [B, M].
    """
    x, query_lens = args
    B = query_lens.shape[0]
    first = torch.arange(B, dtype=torch.int32, device=x.device) * (x.shape[0] // B)
    return x.index_select(0, first + (query_lens - 1).clamp(min=0))


last_rows.lowering("npu")(last_rows_reference)


@last_rows.cost
def _cost(args: LastRows) -> Cost:
    x, query_lens = args
    moved = query_lens.shape[0] * x.shape[1] * x.dtype.itemsize
    return Cost(0, moved + nbytes(query_lens), moved)
