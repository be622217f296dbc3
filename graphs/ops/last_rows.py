"""Turns all rows of a prefill into the last valid row of each request."""

import torch

from ..primitive import Cost, Primitive, nbytes

last_rows = Primitive("last_rows", "(Tensor x, Tensor lengths) -> Tensor", factors="_ m, _ -> _ m")


@last_rows.abstract
def _abstract(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.empty((lengths.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)


@last_rows.reference
def last_rows_reference(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`x[b * Q + lengths[b] - 1]`; a row without valid tokens gives its first.

    Args:
        x: [T, M] with T = B * Q.
        lengths: [B] valid tokens.

    Returns:
        [B, M].
    """
    B = lengths.shape[0]
    first = torch.arange(B, dtype=torch.int32, device=x.device) * (x.shape[0] // B)
    return x.index_select(0, first + (lengths - 1).clamp(min=0))


last_rows.lowering("ge")(last_rows_reference)


@last_rows.cost
def _cost(x: torch.Tensor, lengths: torch.Tensor) -> Cost:
    moved = lengths.shape[0] * x.shape[1] * x.dtype.itemsize
    return Cost(0, moved + nbytes(lengths), moved)
