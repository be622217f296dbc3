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


layer_norm = Primitive("layer_norm", LayerNorm, factors="t _, _, _ -> t _")


@layer_norm.abstract
def _abstract(args: LayerNorm) -> Tensor:
    return torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device)


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


layer_norm.lowering("npu")(layer_norm_reference)


@layer_norm.cost
def _cost(args: LayerNorm) -> Cost:
    return Cost(8 * args.x.numel(), nbytes(args.x, args.weight, args.bias), nbytes(args.x))
