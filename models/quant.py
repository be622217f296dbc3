"""Quantised matrices: their declarations, derived from those of the float matrices, and the products that read either."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..graphs import ops
from ..graphs.errors import ModelError
from ..graphs.quantise import quantise_w4, quantise_w8
from ..graphs.types import Aval, Tree
from .params import Param, Picked, Source, axis_name

Quantise = Callable[[Param], Tree]


def linear(x: torch.Tensor, weight: Tree) -> torch.Tensor:
    """`x @ weight.T` for either format of a weight: a tensor [N, K], or `{"weight": int8 [K, N], "scale": f32 [N]}`."""
    if isinstance(weight, Mapping):
        product: torch.Tensor = ops.quant_linear(x, weight["weight"], weight["scale"])
        return product
    plain: torch.Tensor = ops.linear(x, weight)
    return plain


def _plain(param: Param) -> Tree:
    return param


def _w8a8(param: Param) -> Tree:
    (rows, columns), (out, contracted) = param.aval.shape, param.aval.axes
    join = param.source.join
    weight, scale = Aval((columns, rows), torch.int8, (contracted, out)), Aval((rows,), torch.float32, (out,))
    block_axis = out if param.is_source else None

    def quantised(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantise_w8(join(*tensors).t())

    return {
        "weight": _derived(param, weight, Picked(quantised, 0), contracted, block_axis),
        "scale": _derived(param, scale, Picked(quantised, 1), contracted, block_axis),
    }


LINEAR: dict[str, Quantise] = {"plain": _plain, "w8a8": _w8a8}
"""How a matrix [N, K] is declared, by the format of `Variant.attention`."""


def grouped(param: Param, form: str) -> dict[str, Param]:
    """Declares the experts' matrices [E, K, N] in a format of `Variant.experts` for grouped products.

    Args:
        param: declaration of the float matrices, contraction before output channels.
        form: "grouped", "w8a8" or "w4a8".
    """
    E, K, N = param.aval.shape
    axes, join = param.aval.axes, param.source.join
    scales = (axes[0], axes[2])

    if form == "grouped":
        return {"weight": param}
    if form == "w8a8":
        declared = {"weight": Aval((E, K, N), torch.int8, axes), "scale": Aval((E, N), torch.float32, scales)}
    else:
        declared = {
            "weight": Aval((E, K, N // 8), torch.int32, axes),
            "scale": Aval((E, 1, N), torch.int64, (axes[0], None, axes[2])),
            "assist": Aval((E, N), torch.float32, scales),
        }

    def quantised(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantise_w8(join(*tensors)) if form == "w8a8" else quantise_w4(join(*tensors))

    block_axis = param.source.block_axis
    avals = enumerate(declared.items())
    return {name: _derived(param, aval, Picked(quantised, index), axes[1], block_axis) for index, (name, aval) in avals}


def _derived(param: Param, aval: Aval, join: Callable[..., torch.Tensor], contracted: str | None, block_axis: str | None) -> Param:
    # A scale needs the whole contraction, so that no rank may slice the sources along it.
    axes = tuple(tuple(None if axis_name(axis) == contracted else axis for axis in each) for each in param.source_axes)
    return Param(aval, Source(param.source.names, param.source.shapes, join, _one_way, axes, block_axis), "quantised")


def _one_way(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise ModelError("a quantised parameter cannot be turned back into the floats of a checkpoint; save the model it was quantised from")
