"""Turns gradients into updates: orthogonalised momentum for matrices, Adam for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs import tree
from ...graphs.types import Tree

ADAM_LEAVES = ("embed", "head", "router", "shared_gate", "ba", "conv")
"""Matrices that Adam updates: tables of rows that are used one at a time, and matrices a few rows tall."""


@dataclass(frozen=True)
class Rates:
    """Settings of the optimiser.

    Attributes:
        matrix: step of an orthogonalised update, in units of its spectral norm.
        other: Adam's step size.
        decay: weight decay of matrices, relative to `matrix`.
        momentum, betas, eps: as in the papers.
    """

    matrix: float = 0.02
    other: float = 4e-3
    decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, roughly (singular values within 0.7 to 1.2), of x [..., R, C].

    Five Newton-Schulz steps with the quintic of Muon (K. Jordan et al., 2024, kellerjordan.github.io/posts/muon).
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


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
        self.rates = rates
        self.leaves = {path: leaf for path, leaf in tree.flatten(params) if path.startswith(only)}
        self.step_count = 0
        self._first = {path: torch.zeros_like(leaf) for path, leaf in self.leaves.items()}
        self._second = {path: torch.zeros_like(leaf) for path, leaf in self.leaves.items() if not is_matrix(path, leaf)}

    def state(self) -> dict[str, Any]:
        """What `load` restores."""
        return {"step": self.step_count, "first": self._first, "second": self._second}

    def load(self, state: dict[str, Any]) -> None:
        """Restores a `state`."""
        self.step_count, self._first, self._second = state["step"], state["first"], state["second"]

    @torch.no_grad()
    def update(self, gradients: Iterable[torch.Tensor], factor: float, pool: Executor) -> None:
        """One step.

        Args:
            gradients: of the leaves, in their order.
            factor: multiplies every step size.
            pool: leaves are updated in its threads.
        """
        self.step_count += 1
        jobs = [pool.submit(self._update, path, grad, factor) for path, grad in zip(self.leaves, gradients, strict=True)]
        for job in jobs:
            job.result()

    @torch.no_grad()
    def _update(self, path: str, grad: torch.Tensor, factor: float) -> None:
        leaf, first, rates = self.leaves[path], self._first[path], self.rates
        if path not in self._second:
            first.lerp_(grad, 1 - rates.momentum)
            rows, columns = leaf.shape[-2:]
            rate = rates.matrix * factor
            direction = orthogonalise(grad.lerp(first, rates.momentum))
            leaf.mul_(1 - rate * rates.decay).sub_(direction, alpha=rate * max(1.0, rows / columns) ** 0.5)
            return
        second, (beta1, beta2) = self._second[path], rates.betas
        first.lerp_(grad, 1 - beta1)
        second.lerp_(grad * grad, 1 - beta2)
        mean, square = first / (1 - beta1**self.step_count), second / (1 - beta2**self.step_count)
        leaf.sub_(mean / (square.sqrt() + rates.eps), alpha=rates.other * factor)
