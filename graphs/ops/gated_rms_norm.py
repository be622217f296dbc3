"""Gated RMS norm: the output norm of a gated DeltaNet layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class GatedRmsNorm(NamedTuple):
    """Operands of `gated_rms_norm`."""

    x: Tensor  # [T, H, D]
    gate: Tensor  # [T, H, D]; its dtype is the result's
    weight: Tensor  # [D], not zero-centred
    eps: float  # added to the mean square


gated_rms_norm = Primitive("gated_rms_norm", GatedRmsNorm, factors="t h _, t h _, _ -> t h _")


@gated_rms_norm.abstract
def _abstract(args: GatedRmsNorm) -> Tensor:
    return torch.empty_like(args.x, dtype=args.gate.dtype)


@gated_rms_norm.reference
def gated_rms_norm_reference(args: GatedRmsNorm) -> Tensor:
    """`rms_norm(x) * weight * silu(gate)` over the last dimension.

    Returns:
        [T, H, D].
    """
    x, gate, weight, eps = args
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(gate.dtype)
    return ((weight * unit).float() * torch.nn.functional.silu(gate.float())).to(gate.dtype)


@gated_rms_norm.lowering("npu")
def _npu(args: GatedRmsNorm) -> Any:
    x, gate, weight, eps = args
    unit = torch.ops.npu.npu_rms_norm(x.to(gate.dtype), weight.to(gate.dtype), eps)[0]
    # The gate is rounded to its dtype before the product, which the reference does not do: three launches instead of six.
    # A gate that is a slice of a projection has its strides, which a product may keep.
    return (unit * torch.nn.functional.silu(gate)).contiguous()


@gated_rms_norm.lowering("npu", needs=("aclgraph", "vllm-ascend"))
def _npu_vllm(args: GatedRmsNorm) -> Any:
    """A Triton kernel of vllm-ascend, which takes x and gate of one dtype, and rows that lie apart."""
    x, gate, weight, eps = args
    x = x.to(gate.dtype).contiguous()
    return torch.ops.npucompile_packages.rms_norm_gated(x.flatten(0, 1), weight, gate.flatten(0, 1), eps).view(x.shape)


@gated_rms_norm.cost
def _cost(args: GatedRmsNorm) -> Cost:
    return Cost(9 * args.x.numel(), nbytes(args.x, args.gate, args.weight), nbytes(args.gate))
