"""Normalisation of vectors to mean 0 and variance 1, then scaled and shifted."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class LayerNorm(NamedTuple):
    """Operands of `layer_norm`."""

    x: Tensor  # [T, D]
    weight: Tensor  # [D]
    bias: Tensor  # [D]
    eps: float


layer_norm = Primitive("layer_norm", LayerNorm, factors="t _, _, _ -> t _", like="x")


@layer_norm.reference
def layer_norm_reference(args: LayerNorm) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, in f32 (arXiv:1607.06450).

    Returns:
        [T, D], dtype of x.
    """
    x, weight, bias, eps = args
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype).contiguous()


_FEW_CHANNELS = 128
"""Rows of up to so many channels, which are keys of an indexer, are normalised by single operators on NPUs."""


@layer_norm.lowering("npu")
def _npu(args: LayerNorm) -> Tensor:
    """One kernel for rows of patches, over which single operators would pass ten times in f32."""
    x, weight, bias, eps = args
    if x.shape[-1] <= _FEW_CHANNELS:
        return layer_norm_reference(args)
    return torch.native_layer_norm(x.contiguous(), x.shape[-1:], weight, bias, eps)[0]


@layer_norm.cost
def _cost(args: LayerNorm) -> Cost:
    return Cost(8 * args.x.numel(), nbytes(args.x, args.weight, args.bias), nbytes(args.x))
