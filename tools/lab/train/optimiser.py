"""The optimiser of the bundled model: Muon for matrices, Adam for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from ....graphs import tree
from ....graphs.types import Tree

ADAM_LEAVES = ("embed", "head", "router", "shared_gate", "conv")
"""Matrices that Adam updates: tables of rows that are used one at a time, and matrices a few rows tall."""


@dataclass(frozen=True)
class Rates:
    """Settings of the optimiser.

    Attributes:
        matrix: Muon's step size, in units of a matrix's spectral norm.
        other: Adam's step size.
        decay: weight decay of matrices, relative to `matrix`.
        momentum: Muon's.
        betas, eps: Adam's.
    """

    matrix: float = 0.02
    other: float = 4e-3
    decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10


def is_matrix(path: str, value: torch.Tensor) -> bool:
    """Whether a parameter is updated as a matrix (or a stack of them, leading dimensions first)."""
    return value.dim() >= 2 and path.rsplit(".", 1)[-1] not in ADAM_LEAVES


class Optimiser:
    """Updates the tensors of a tree in place.

    Args:
        params: tree of tensors; those whose path does not start with `only` stay as they are.
        rates: settings.
        only: prefix of the paths to update.
    """

    def __init__(self, params: Tree, rates: Rates, only: str = "") -> None:
        self.leaves = {path: leaf for path, leaf in tree.flatten(params) if path.startswith(only)}
        # Muon takes single matrices only; those of a stack are views of its memory.
        self._parts = {path: matrices(leaf) if is_matrix(path, leaf) else [leaf.detach()] for path, leaf in self.leaves.items()}
        # An optimiser a leaf, so that leaves can be updated in several threads.
        self._optimisers = {path: _optimiser(is_matrix(path, self.leaves[path]), parts, rates) for path, parts in self._parts.items()}

    def update(self, gradients: Iterable[torch.Tensor], factor: float, pool: Executor) -> None:
        """One step.

        Args:
            gradients: of the leaves, in their order.
            factor: multiplies every step size.
            pool: leaves are updated in its threads.
        """
        jobs = [pool.submit(self._update, path, grad, factor) for path, grad in zip(self.leaves, gradients, strict=True)]
        for job in jobs:
            job.result()

    def _update(self, path: str, grad: torch.Tensor, factor: float) -> None:
        parts, optimiser = self._parts[path], self._optimisers[path]
        for part, its_grad in zip(parts, matrices(grad) if len(parts) > 1 else [grad.view_as(parts[0])], strict=True):
            part.grad = its_grad
        (group,) = optimiser.param_groups
        group["lr"] = group["initial_lr"] * factor
        optimiser.step()


def matrices(leaf: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a stack [..., R, C], as views."""
    return list(leaf.detach().reshape(-1, *leaf.shape[-2:]).unbind())


def _optimiser(matrix: bool, parts: list[torch.Tensor], rates: Rates) -> torch.optim.Optimizer:
    lr = rates.matrix if matrix else rates.other
    groups = [{"params": parts, "initial_lr": lr}]
    if matrix:
        return torch.optim.Muon(groups, lr=lr, weight_decay=rates.decay, momentum=rates.momentum)
    return torch.optim.Adam(groups, lr=lr, betas=rates.betas, eps=rates.eps)
