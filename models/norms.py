"""RMS norms whose weight may have a bias beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..graphs import ops
from ..graphs.types import Tree


def rms_norm(x: torch.Tensor, weight: Tree, eps: float, offset: float) -> torch.Tensor:
    """`ops.rms_norm` of x [..., M], plus the bias.

    Args:
        weight: [M], or a mapping of `weight` [M] and `bias` [M].
    """
    plain = weight["weight"] if isinstance(weight, Mapping) else weight
    normed: torch.Tensor = ops.rms_norm(x, plain, eps, offset)
    return normed + weight["bias"] if isinstance(weight, Mapping) else normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: Tree, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.add_rms_norm` of a block's output and the residual stream, each [T, M], plus the bias; `weight` as of `rms_norm`.

    Returns:
        the normalised sum, and the sum.
    """
    plain = weight["weight"] if isinstance(weight, Mapping) else weight
    normed, stream = ops.add_rms_norm(x, residual, plain, eps, offset)
    return normed + weight["bias"] if isinstance(weight, Mapping) else normed, stream
