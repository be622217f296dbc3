"""Queries, keys and values of a gated DeltaNet layer, from the outputs of its convolution: queries and keys of unit length."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..primitive import Cost, Primitive, nbytes
from .l2_norm import L2Norm, l2_norm_npu, l2_norm_reference


class DeltaHeads(NamedTuple):
    """Operands of `delta_heads`; r value heads share a key head."""

    x: Tensor  # [T, Hk, 2 Dk + r Dv], of each key head: its query, its key, its values
    key_width: int  # Dk
    eps: float  # added to the sum of squares
    scale: float  # multiplies the queries


delta_heads = Primitive("delta_heads", DeltaHeads, factors="t h _ -> t h _, t h _, t h _")


def _parts(args: DeltaHeads) -> tuple[Tensor, ...]:
    width, values = args.key_width, args.x.shape[2] - 2 * args.key_width
    if values < 1:
        raise PrimitiveError(f"delta_heads has {args.x.shape[2]} channels a key head; legal are more than twice the {width} of a key")
    return torch.split(args.x, [width, width, values], -1)


@delta_heads.abstract
def _abstract(args: DeltaHeads) -> tuple[Tensor, ...]:
    return tuple(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in _parts(args))


@delta_heads.reference
def delta_heads_reference(args: DeltaHeads) -> tuple[Tensor, ...]:
    """`ops.l2_norm` of queries, scaled, and of keys; copies of values.

    Returns:
        q [T, Hk, Dk], k [T, Hk, Dk] and v [T, Hk, r Dv], in the dtype of x.
    """
    q, k, v = _parts(args._replace(x=args.x.contiguous()))
    return l2_norm_reference(L2Norm(q, args.eps, args.scale)), l2_norm_reference(L2Norm(k, args.eps, 1.0)), v.contiguous()


@delta_heads.lowering("npu")
def _npu(args: DeltaHeads) -> Any:
    q, k, v = _parts(args)
    return l2_norm_npu(L2Norm(q, args.eps, args.scale)), l2_norm_npu(L2Norm(k, args.eps, 1.0)), v.contiguous()


SGL_ROWS = 65535
"""Most rows of sgl-kernel-npu's kernel: each is a program, and CANN starts no more at once."""


@delta_heads.lowering("npu", needs=("aclgraph", "sgl-kernel-npu"))
def _npu_sgl(args: DeltaHeads) -> Any:
    """A Triton kernel of sgl-kernel-npu, made for latent attention, with a row for each key head of a token.

    It norms by the mean of squares: `x / sqrt(sum(x^2) + eps) = D^-0.5 x / sqrt(mean(x^2) + eps / D)`.

    Raises:
        PrimitiveError: there are too many rows, or a size is no power of two: the kernel reads ranges of them.
    """
    T, Hk, width = args.x.shape
    values = _parts(args)[2].shape[-1]
    if T * Hk > SGL_ROWS or any(size & (size - 1) for size in (args.key_width, values)):
        raise PrimitiveError(
            f"delta_heads has {T} tokens, {Hk} key heads, and {args.key_width} key and {values} value channels of each; legal are at most "
            f"{SGL_ROWS} heads of all tokens, and powers of two"
        )
    gammas = (
        torch.full((args.key_width,), scale * args.key_width**-0.5, dtype=torch.float32, device=args.x.device)
        for scale in (args.scale, 1.0)
    )
    parts = torch.ops.npucompile_packages.split_qk_norm(args.x.reshape(T * Hk, width), *gammas, args.eps / args.key_width)
    return tuple(part.view(T, Hk, -1) for part in parts)


@delta_heads.cost
def _cost(args: DeltaHeads) -> Cost:
    T, Hk, _ = args.x.shape
    return Cost(8 * T * Hk * args.key_width, nbytes(args.x), nbytes(args.x))
