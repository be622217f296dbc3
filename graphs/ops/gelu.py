"""Gaussian error linear unit."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Gelu(NamedTuple):
    """Operands of `gelu`."""

    x: Tensor  # [T, F]
    tanh: bool  # whether the formula with a hyperbolic tangent stands for the exact one


gelu = Primitive("gelu", Gelu, factors="t f -> t f", like="x")


@gelu.reference
def gelu_reference(args: Gelu) -> Tensor:
    """`x * Phi(x)` with the normal distribution's Phi, exact or by a hyperbolic tangent (arXiv:1606.08415); they differ by up to 5e-4.

    Returns:
        [T, F], dtype of x.
    """
    return torch.nn.functional.gelu(args.x.contiguous(), approximate="tanh" if args.tanh else "none")


@gelu.lowering("npu")
def _npu(args: Gelu) -> Any:
    """The operator of both formulas: torchair's converter of `aten.gelu` takes the second one whatever it is asked for."""
    return torch.ops.npu.npu_gelu(args.x.contiguous(), approximate="tanh" if args.tanh else "none")


@gelu.cost
def _cost(args: Gelu) -> Cost:
    return Cost(8 * args.x.numel(), nbytes(args.x), nbytes(args.x))
