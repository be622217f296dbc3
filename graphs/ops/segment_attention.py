"""Attention inside segments, each of which sees itself whole: no order, no pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class SegmentAttention(NamedTuple):
    """Operands of `segment_attention`."""

    q: Tensor  # [S, N, H, D]
    k: Tensor  # [S, N, H, D]
    v: Tensor  # [S, N, H, D]
    lengths: Tensor  # [S] integers; places of a segment at and beyond its length are padding, and may hold anything
    scale: float  # multiplies the scores


segment_attention = Primitive("segment_attention", SegmentAttention, factors="b _ h _, b _ h _, b _ h _, b -> b _ h _", like="q")

MOST_SCORES = 2**24
"""Scores that the reference holds at once: those of a layer over one picture of 4096 x 4096 would take 275 GB."""


def _live(args: SegmentAttention) -> Tensor:
    """[S, N], which places have something."""
    return torch.arange(args.q.shape[1], device=args.lengths.device)[None] < args.lengths[:, None]


def _without_padding(x: Tensor, live: Tensor) -> Tensor:
    return torch.where(live[:, :, None, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


@segment_attention.reference
def segment_attention_reference(args: SegmentAttention) -> Tensor:
    """`softmax(scale * q @ k.T) @ v` over the keys of the query's segment, a block of queries after the other; softmax in f32.

    Returns:
        [S, N, H, D], dtype of q; zeros where there is padding.
    """
    live = _live(args)
    S, N, H, _ = args.q.shape
    q, k, v = (_without_padding(x, live).transpose(1, 2) for x in args[:3])
    hidden, most = ~live[:, None, None, :], max(1, MOST_SCORES // (S * H * N))
    blocks = []
    for block in q.split(most, 2):
        scores = (block @ k.transpose(2, 3)).float() * args.scale
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        blocks.append(weights.to(v.dtype) @ v)
    return _without_padding(torch.cat(blocks, 2).transpose(1, 2), live).contiguous()


@segment_attention.lowering("inductor")
def _cpu(args: SegmentAttention) -> Any:
    """Torch's fused kernel, which never holds the scores whole either. A segment of padding sees its first place, and becomes zeros."""
    live = _live(args)
    q, k, v = (_without_padding(x, live).transpose(1, 2) for x in args[:3])
    first = torch.arange(live.shape[1], device=live.device)[None] == 0
    mask = (live | first)[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=args.scale)
    return _without_padding(out.transpose(1, 2), live).contiguous()


# Heads of the fused kernel fill tiles of 16 channels (lowering/ascend/operators/legality/attention.json).
_NPU_WIDTH = 16


@segment_attention.lowering("npu")
def _npu(args: SegmentAttention) -> Any:
    """The fused kernel without pages or mask; the numbers of keys are operands, so that one graph serves all lengths.

    Padding must be finite, and gives finite numbers: every query attends to the keys of its segment, in one of padding to the first place.
    Heads of other widths get channels of zeros; who declares heads of whole tiles pays for no copies.
    """
    q, k, v, lengths, scale = args
    H, D = q.shape[2:]
    if D % _NPU_WIDTH:
        zeros = q.new_zeros(*q.shape[:3], -D % _NPU_WIDTH)
        q, k, v = (torch.cat([x, zeros], -1) for x in (q, k, v))
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        *(x.contiguous() for x in (q, k, v)),
        actual_seq_lengths_kv=lengths.clamp(min=1).to(torch.int64),
        num_heads=H,
        num_key_value_heads=H,
        scale=scale,
        input_layout="BSND",
        sparse_mode=0,
    )
    return out[..., :D].contiguous() if D % _NPU_WIDTH else out


@segment_attention.cost
def _cost(args: SegmentAttention) -> Cost:
    q, k, v, lengths, _ = args
    return Cost(4 * q.numel() * q.shape[1], nbytes(q, k, v, lengths), nbytes(q))
