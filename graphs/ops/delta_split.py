"""The projection of a gated DeltaNet layer, taken apart: inputs of its convolution, output gates, and the two gates of its state."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..primitive import Cost, Primitive, nbytes


class DeltaSplit(NamedTuple):
    """Operands of `delta_split`; r value heads share a key head."""

    x: Tensor  # [T, Hk, 2 Dk + 2 r Dv + 2 r], of each key head: q, k, v, z, b, a
    key_width: int  # Dk
    value_width: int  # Dv
    value_heads: int  # r


delta_split = Primitive("delta_split", DeltaSplit, factors="t h _ -> t h _, t h _, t h _, t h _")


def _widths(args: DeltaSplit) -> list[int]:
    """Of q, k and v together; of z; of b; of a."""
    values = args.value_heads * args.value_width
    widths = [2 * args.key_width + values, values, args.value_heads, args.value_heads]
    if sum(widths) != args.x.shape[2]:
        raise PrimitiveError(f"delta_split has {args.x.shape[2]} channels a key head; legal is the sum of {widths}")
    return widths


@delta_split.abstract
def _abstract(args: DeltaSplit) -> tuple[Tensor, ...]:
    return tuple(torch.empty(*args.x.shape[:2], width, dtype=args.x.dtype, device=args.x.device) for width in _widths(args))


@delta_split.reference
def delta_split_reference(args: DeltaSplit) -> tuple[Tensor, ...]:
    """Copies of the parts.

    Returns:
        q, k and v of each key head [T, Hk, 2 Dk + r Dv], z [T, Hk, r Dv], b [T, Hk, r] and a [T, Hk, r].
    """
    return tuple(part.contiguous() for part in args.x.split(_widths(args), -1))


delta_split.lowering("npu")(delta_split_reference)


@delta_split.lowering("npu", needs=("aclgraph", "vllm-ascend"))
def _npu_vllm(args: DeltaSplit) -> Any:
    """A Triton kernel of vllm-ascend, with a row for each key head of a token.

    Raises:
        PrimitiveError: a size is no power of two: the kernel reads ranges of them.
    """
    _widths(args)
    sizes = (args.key_width, args.value_width, args.value_heads)
    if any(size & (size - 1) for size in sizes):
        raise PrimitiveError(f"delta_split has {sizes} key channels, value channels and value heads of a key head; legal are powers of two")
    T, Hk, _ = args.x.shape
    return tuple(part.view(T, Hk, -1) for part in torch.ops.npucompile_packages.split_qkvzba(args.x.reshape(T * Hk, -1), *sizes))


@delta_split.cost
def _cost(args: DeltaSplit) -> Cost:
    return Cost(0, nbytes(args.x), nbytes(args.x))
