"""Products of references, which may compute bfloat16 in float32 where torch has no kernel for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_WIDENED = ContextVar("widened", default=False)

FEW_ROWS = 8
"""Rows up to which torch's bfloat16 is the faster one: it reads half the bytes. Of 16 rows it takes 2.2 times as long, of 512 6 times
(60,000 x 1,024, two cores of a Zen 3)."""

_PIECE = 2**20
"""Elements of a weight matrix that are widened at a time, which a cache keeps."""


@contextmanager
def widened(wide: bool = True) -> Iterator[None]:
    """Inside, products of bfloat16 are computed in float32 and rounded once, as bfloat16 kernels with sums in float32 do."""
    token = _WIDENED.set(wide)
    try:
        yield
    finally:
        _WIDENED.reset(token)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of x [T, K] and weight [N, K]."""
    if not _widens(x) or x.shape[0] <= FEW_ROWS:
        return torch.nn.functional.linear(x, weight)
    wide, y = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    for part, out in zip(*(t.split(max(1, _PIECE // weight.shape[1]), d) for t, d in ((weight, 0), (y, 1))), strict=True):
        out.copy_(wide @ part.float().t())
    return y


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of a [B, M, K] and b [B, K, N]."""
    return torch.bmm(a.float(), b.float()).to(a.dtype) if _widens(a) else torch.bmm(a, b)


def _widens(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and _WIDENED.get()
