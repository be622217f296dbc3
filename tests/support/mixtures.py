"""Operands of mixtures of experts."""

from __future__ import annotations

import torch

NAN = float("nan")


def mixture(T: int, X: int, E: int, F: int, M: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x [T, M], shares [T, X] of float32, ids [T, X] that include other ranks' experts, gate_up [E, 2, F, M] and down [E, M, F].

    Weights of experts that are not chosen are NaN.
    """

    def randn(*shape: int, offset: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed + offset)).to(dtype)

    r = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, X), generator=r, dtype=torch.int32)
    gate_up, down = randn(E, 2, F, M, offset=1), randn(E, M, F, offset=2)
    unchosen = [e for e in range(E) if not (ids == e).any()]
    gate_up[unchosen], down[unchosen] = NAN, NAN
    return randn(T, M, offset=3), torch.rand(T, X, generator=r), ids, gate_up, down
