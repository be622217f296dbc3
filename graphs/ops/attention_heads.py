"""Heads of an attention layer, from the projection that holds all of them: queries and keys normalised and rotated."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..primitive import Cost, Primitive, nbytes
from .rms_norm import RmsNorm, npu_gamma, rms_norm_reference
from .rope import Rope, rope_reference


class AttentionHeads(NamedTuple):
    """Operands of `attention_heads`; P query heads share a key-value head."""

    x: Tensor  # [T, G, (2P + 2) D], of each key-value head: P times a query and its gate, its key, its value
    q_weight: Tensor  # [D], zero-centred
    k_weight: Tensor  # [D], zero-centred
    cos: Tensor  # [T, R/2] f32 with R <= D
    sin: Tensor  # [T, R/2] f32
    eps: float  # added to the mean square


attention_heads = Primitive("attention_heads", AttentionHeads, factors="t g _, _, _, t _, t _ -> t g _, t g _, t g _, t g _")


def _sizes(args: AttentionHeads) -> tuple[int, int]:
    """P and D."""
    D = args.q_weight.shape[0]
    queries, rest = divmod(args.x.shape[2], 2 * D)
    if rest or queries < 2:
        raise PrimitiveError(
            f"attention_heads has {args.x.shape[2]} channels a key-value head, and heads of {D}; legal are multiples of {2 * D} above it"
        )
    return queries - 1, D


@attention_heads.abstract
def _abstract(args: AttentionHeads) -> tuple[Tensor, ...]:
    (T, G, _), (P, D) = args.x.shape, _sizes(args)
    return tuple(torch.empty(T, G, width, dtype=args.x.dtype, device=args.x.device) for width in (P * D, D, D, P * D))


@attention_heads.reference
def attention_heads_reference(args: AttentionHeads) -> tuple[Tensor, ...]:
    """RMS norm (`ops.rms_norm`) of each query and key, whose channel i < R/2 is then rotated with channel i + R/2.

    Returns:
        queries [T, G, P D], keys [T, G, D], values [T, G, D] and gates [T, G, P D], in the dtype of x.
    """
    P, D = _sizes(args)
    pairs, k, v = args.x.split([2 * P * D, D, D], -1)
    q, gate = pairs.unflatten(-1, (P, 2, D)).unbind(-2)
    q, k = (_rotated(args, x, weight) for x, weight in ((q, args.q_weight), (k[:, :, None], args.k_weight)))
    return q.flatten(2), k.flatten(2), v.contiguous(), gate.reshape(q.flatten(2).shape)


def _rotated(args: AttentionHeads, x: Tensor, weight: Tensor) -> Tensor:
    """[T, G, P, D] after norm and rotation."""
    T, G, P, D = x.shape
    unit = rms_norm_reference(RmsNorm(x, weight, args.eps, 1.0)).reshape(T, G * P, D)
    width = 2 * args.cos.shape[1]
    return torch.cat([rope_reference(Rope(unit[..., :width], args.cos, args.sin)), unit[..., width:]], -1).view(T, G, P, D)


attention_heads.lowering("npu")(attention_heads_reference)


@attention_heads.lowering("npu", needs=("aclgraph", "vllm-ascend"))
def _npu_vllm(args: AttentionHeads) -> Any:
    """A Triton kernel of vllm-ascend, with a row for each key-value head of a token.

    Raises:
        PrimitiveError: a size is no power of two: the kernel reads ranges of them.
    """
    (T, G, _), (P, D), half = args.x.shape, _sizes(args), args.cos.shape[1]
    if odd := sorted({size for size in (P, D, half) if size & (size - 1)}):
        raise PrimitiveError(
            f"attention_heads has sizes {odd}: {P} query heads a key-value head, heads of {D}, {half} angles; legal are powers of two"
        )
    angles = torch.cat([args.cos, args.sin], -1).to(args.x.dtype)
    gammas = (npu_gamma(args.x, weight, 1.0) for weight in (args.q_weight, args.k_weight))
    rows = torch.ops.npucompile_packages.split_qkv_rmsnorm_rope(
        args.x.reshape(T * G, -1), *gammas, angles[:, None].expand(-1, G, -1).reshape(T * G, -1) if G > 1 else angles, P, 1, args.eps
    )
    return tuple(x.view(T, G, -1) for x in rows)


@attention_heads.cost
def _cost(args: AttentionHeads) -> Cost:
    (T, G, _), (P, D) = args.x.shape, _sizes(args)
    return Cost(T * G * (P + 1) * (4 * D + 6 * args.cos.shape[1]), nbytes(*args[:5]), nbytes(args.x))
