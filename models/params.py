"""Turns the declaration of a parameter into its abstract value, its random initialisation and its place in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graphs import tree
from ..graphs.types import Aval, Tree


def _same(*tensors: torch.Tensor) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _alone(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor,)


@dataclass(frozen=True)
class Source:
    """Where a parameter lies in a Hugging Face checkpoint.

    Attributes:
        names: tensors it is made of.
        join: those tensors -> the parameter.
        split: the parameter -> those tensors; the inverse of join.
        shapes: the tensors' shapes on disk.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[..., torch.Tensor] = _same
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = _alone


@dataclass(frozen=True)
class Param:
    """One parameter before it exists.

    Attributes:
        aval: shape, dtype and logical axes.
        source: its place in a checkpoint.
        init: "normal" (scaled by its last dimension), "zeros", "ones", or "embedding".
    """

    aval: Aval
    source: Source
    init: str = "normal"


def avals(params: Tree) -> Tree:
    """The abstract values of a tree of Param."""
    return tree.map_leaves(lambda p: p.aval, params)


def initialise(params: Tree, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tree:
    """Random tensors for a tree of Param, in declaration order from one generator.

    Args:
        params: tree of Param.
        generator: CPU generator; its state advances.
        dtype: overrides every floating dtype; None keeps the declared ones.
    """

    def draw(param: Param) -> torch.Tensor:
        shape, kind = param.aval.shape, dtype or param.aval.dtype
        if param.init in ("zeros", "ones"):
            return torch.full(shape, float(param.init == "ones"), dtype=kind)
        std = 0.02 if param.init == "embedding" else shape[-1] ** -0.5
        return (torch.randn(shape, generator=generator) * std).to(kind)

    return tree.map_leaves(draw, params)
