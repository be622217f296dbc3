"""The gated activation of a SwiGLU feed-forward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Swiglu(NamedTuple):
    """Operand of `swiglu`."""

    x: Tensor  # [T, 2F], gate then up


swiglu = Primitive("swiglu", Swiglu, factors="t _ -> t _")


@swiglu.abstract
def _abstract(args: Swiglu) -> Tensor:
    return torch.empty((args.x.shape[0], args.x.shape[1] // 2), dtype=args.x.dtype, device=args.x.device)


@swiglu.reference
def swiglu_reference(args: Swiglu) -> Tensor:
    """`silu(gate) * up` (arXiv:2002.05202).

    Returns:
        [T, F], dtype of x.
    """
    gate, up = args.x.contiguous().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@swiglu.lowering("npu")
def _npu(args: Swiglu) -> Any:
    return torch.ops.npu.npu_swiglu(args.x)


@swiglu.cost
def _cost(args: Swiglu) -> Cost:
    return Cost(5 * args.x.numel() // 2, nbytes(args.x), nbytes(args.x) // 2)
