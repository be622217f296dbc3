"""Turns per-head outputs and a gate into normalised, gated outputs."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

gated_rms_norm = Primitive(
    "gated_rms_norm", "(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor", factors="t h _, t h _, _ -> t h _"
)


@gated_rms_norm.abstract
def _abstract(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=gate.dtype)


@gated_rms_norm.reference
def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) * weight * silu(gate)` over the last dimension: the output norm of a gated DeltaNet layer.

    Args:
        x: [T, H, D].
        gate: [T, H, D]; its dtype is the result's.
        weight: [D], not zero-centred.

    Returns:
        [T, H, D].
    """
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(gate.dtype)
    return ((weight * unit).float() * torch.nn.functional.silu(gate.float())).to(gate.dtype)


@gated_rms_norm.lowering("ge")
def _npu(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    unit = torch.ops.npu.npu_rms_norm(x.to(gate.dtype), weight.to(gate.dtype), eps)[0]
    return (unit.float() * torch.nn.functional.silu(gate.float())).to(gate.dtype)


@gated_rms_norm.cost
def _cost(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> Cost:
    return Cost(9 * x.numel(), nbytes(x, gate, weight), nbytes(gate))
