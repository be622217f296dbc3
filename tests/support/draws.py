"""Operands of primitives: drawn, and of integers."""

from __future__ import annotations

from typing import Any

import torch

NAN = float("nan")


class Draw:
    """Random operands of one dtype, the same every time."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 7) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).to(self.dtype)

    def f32(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def unit(self, *shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(self.f32(*shape), dim=-1)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=self.generator, dtype=torch.int32)

    def choices(self, tokens: int, chosen: int, experts: int) -> torch.Tensor:
        """[tokens, chosen] ids of experts, distinct for each token."""
        return self.uniform(tokens, experts).argsort(-1)[:, :chosen].int()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poison(x: torch.Tensor, *where: Any) -> torch.Tensor:
    """A copy with NaN at each of these places."""
    x = x.clone()
    for index in where:
        x[index] = NAN
    return x
