"""Declarations of parameters: abstract value, random initialisation, and where a checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graphs import tree
from ..graphs.types import Aval, Tree


def _single(*tensors: torch.Tensor) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _alone(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor,)


@dataclass(frozen=True)
class Source:
    """The tensors of a Hugging Face checkpoint that a parameter is made from.

    Attributes:
        names: the tensors.
        shapes: their shapes on disk.
        join: those tensors -> the parameter.
        split: the parameter -> those tensors; the inverse of join.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[..., torch.Tensor] = _single
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = _alone


@dataclass(frozen=True)
class Param:
    """One parameter before it exists.

    Attributes:
        aval: shape, dtype and logical axes.
        source: the tensors of a checkpoint it is made from.
        init: "normal" (standard deviation 1 / sqrt(last dimension)), "embedding" (0.02), "zeros", "ones", or "quantised", which
            is never drawn.
    """

    aval: Aval
    source: Source
    init: str = "normal"


def avals(params: Tree) -> Tree:
    """Tree of Param -> tree of their abstract values."""
    return tree.map_leaves(lambda p: p.aval, params)


def initialise(params: Tree, generator: torch.Generator) -> Tree:
    """Random tensors for a tree of Param, in declaration order from one generator.

    Args:
        params: tree of Param.
        generator: CPU generator; its state advances.
    """

    def draw(param: Param) -> torch.Tensor:
        shape, dtype = param.aval.shape, param.aval.dtype
        if param.init in ("zeros", "ones"):
            return torch.full(shape, float(param.init == "ones"), dtype=dtype)
        std = 0.02 if param.init == "embedding" else shape[-1] ** -0.5
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    return tree.map_leaves(draw, params)
