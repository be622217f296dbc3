"""graphs/ops/delta_products.py: equals the token-by-token rule in float64, for any number of chunks, grouped or not."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.ops.delta_products import HIDDEN, chunked_delta, unit_lower_inverse


def token_by_token(q, k, v, g, beta, state):
    """The recurrence as its paper states it, float64; key head j serves value heads j*r .. j*r+r-1."""
    per = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(per, 2) for x in (q, k))
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None]).sum(-1))
        state = state + error[..., None] * k[:, t, :, None]
        outs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outs, 1), state


def operands(B, Q, *, repeated=False):
    r = torch.Generator().manual_seed(Q)
    draw = lambda *shape: torch.randn(shape, generator=r)  # noqa: E731
    unit = lambda *shape: torch.nn.functional.normalize(draw(*shape), dim=-1)  # noqa: E731
    q, k, v = unit(B, Q, 2, 6), unit(B, Q, 2, 6), draw(B, Q, 4, 5)
    g, beta = -torch.rand(B, Q, 4, generator=r), torch.rand(B, Q, 4, generator=r)
    if repeated:
        k, g, beta = k[:, :1].expand_as(k), torch.zeros_like(g), torch.ones_like(beta)
    return q, k, v, g, beta, draw(B, 4, 5, 6)


def in_chunks(q, k, v, g, beta, state, chunk):
    """Outputs by token and the state, from operands by token."""
    q, k, v, g, beta = (x.unflatten(1, (-1, chunk)).transpose(2, 3).contiguous() for x in (q, k, v, g, beta))
    out, last = chunked_delta(q, k, v, g, beta.log().clamp(min=HIDDEN), state)
    return out.transpose(2, 3).flatten(1, 2), last


@pytest.mark.parametrize(("Q", "chunk"), [(8, 8), (6, 2), (64, 8), (128, 8), (96, 8), (256, 16), (128, 64), (512, 64), (7, 1)])
def test_it_is_the_recurrence(Q, chunk):
    given = operands(2, Q)
    want = token_by_token(*(x.double() for x in given))
    for got, exact in zip(in_chunks(*given, chunk), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("C", [*range(1, 9), 16, 64, 128])
def test_the_inverse_reads_only_what_is_below_the_diagonal(C):
    matrix = torch.rand(3, C, C, generator=torch.Generator().manual_seed(C)) * 2 - 1
    unit = matrix.double().tril(-1) + torch.eye(C, dtype=torch.float64)
    product = unit_lower_inverse(matrix.double()) @ unit
    torch.testing.assert_close(product, torch.eye(C, dtype=torch.float64).expand(3, C, C), rtol=1e-6, atol=1e-6)
