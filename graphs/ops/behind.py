"""An order between what communicates: a group's exchanges must start in one order on all devices, and data does not always say which."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ordering import after
from ..primitive import Cost, Primitive, nbytes


class Behind(NamedTuple):
    """Operands of `behind`."""

    x: Tensor  # [T, M]
    earlier: Tensor  # [T, N]


behind = Primitive("behind", Behind, factors="t m, _ _ -> t m")


@behind.abstract
def _abstract(args: Behind) -> Tensor:
    return torch.empty_like(args.x)


@behind.reference
def behind_reference(args: Behind) -> Tensor:
    """`x`, whose communication starts when `earlier` has been computed. What runs in the order of its graph needs no more."""
    return args.x.clone()


@behind.lowering("npu")
def behind_npu(args: Behind) -> Tensor:
    """No operator: an edge to the one that communicates x."""
    return after(args.x, args.earlier)


@behind.cost
def _cost(args: Behind) -> Cost:
    return Cost(0, nbytes(args.x), nbytes(args.x))
