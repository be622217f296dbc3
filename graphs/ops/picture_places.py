"""Where the patches of pictures lie: rows and columns, and what a learned table of positions has around each."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class PicturePlaces(NamedTuple):
    """Operands of `picture_places`."""

    grids: Tensor  # [S, 2] integers, rows and columns of patches of each segment; multiples of `merge`, 0 and 0 for padding
    patches: int  # N, places of a segment, of which the first rows x columns have patches
    merge: int  # patches lie in blocks of merge x merge: by block row, block column, row in the block, column in the block
    side: int  # the table has side x side positions


picture_places = Primitive("picture_places", PicturePlaces, factors="b _ -> b _, b _, b _ _, b _ _")


@picture_places.abstract
def _abstract(args: PicturePlaces) -> tuple[Tensor, ...]:
    shape, device = (args.grids.shape[0], args.patches), args.grids.device
    ids = [torch.empty(each, dtype=torch.int32, device=device) for each in (shape, shape, (*shape, 4))]
    return *ids, torch.empty((*shape, 4), dtype=torch.float32, device=device)


@picture_places.reference
def picture_places_reference(args: PicturePlaces) -> tuple[Tensor, ...]:
    """Rows and columns of patches, and the bilinear taps of a table that is stretched over the picture, corners on corners.

    Returns:
        rows and columns [S, N] i32; indices of the flat table [S, N, 4] i32, and their weights [S, N, 4] f32, which sum to 1. Places
        without a patch have those of the first.
    """
    grids, N, merge, side = args
    heights, widths = grids[:, :1], grids[:, 1:]
    place = torch.arange(N, dtype=torch.int32, device=grids.device)[None]
    block, inside = place // merge**2, place % merge**2
    across = (widths // merge).clamp(min=1)
    live = place < heights * widths
    rows, columns = block // across * merge + inside // merge, block % across * merge + inside % merge
    rows, columns = (torch.where(live, x, 0).to(torch.int32) for x in (rows, columns))
    (upper, lower), high = _taps(rows, heights, side)
    (left, right), wide = _taps(columns, widths, side)
    taps = torch.stack([y * side + x for y in (upper, lower) for x in (left, right)], -1)
    weights = torch.stack([a * b for a in high for b in wide], -1)
    return rows, columns, taps, weights


def _taps(index: Tensor, size: Tensor, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Neighbours on one axis of the table, [S, N] i32, and their weights, [S, N] f32."""
    # In integers, so that the index of a row never depends on floats (lowering/ascend/index_bounds.py).
    steps, scaled = (size - 1).clamp(min=1), index * (side - 1)
    first = (scaled // steps).clamp(0, side - 1)
    share = scaled.float() / steps.float() - first.float()
    return (first, (first + 1).clamp(max=side - 1)), (share.neg() + 1, share)


picture_places.lowering("npu")(picture_places_reference)


@picture_places.cost
def _cost(args: PicturePlaces) -> Cost:
    places = args.grids.shape[0] * args.patches
    return Cost(30 * places, nbytes(args.grids), 40 * places)
