"""graphs/ops/causal_conv.py: the convolution equals torch's conv1d over a request's whole history, and its windows are that history."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import ops


def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of torch's conv1d over [B, Q, C], from zeros."""
    C, taps = weight.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
    return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=C)).transpose(1, 2)


def i32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[9], [4, 5], [1, 1, 7], [2, 1, 3, 3]])
def test_a_prompt_cut_in_chunks_is_one_convolution(taps: int, cuts: list[int]) -> None:
    """Each chunk is padded with garbage to 9 tokens and continues from the state of the previous chunk."""
    r = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 9, 5, generator=r), torch.randn(5, taps, generator=r)
    pool = torch.full((4, taps - 1, 5), float("nan"))
    outs, at = [], 0
    for i, length in enumerate(cuts):
        chunk = torch.full((1, 9, 5), float("nan"))
        chunk[:, :length] = x[:, at : at + length]
        out, pool = ops.causal_conv(chunk, weight, pool, i32(1 + i % 2), i32([2 - i % 2]), i32(at), i32(length), x.dtype)
        outs.append(out[:, :length])
        at += length
    torch.testing.assert_close(torch.cat(outs, 1), whole(x, weight), rtol=1e-5, atol=1e-5)
    history = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    assert torch.equal(pool[2 - (len(cuts) - 1) % 2], history[0, 9:])


def test_every_token_stores_the_window_after_it() -> None:
    r = torch.Generator().manual_seed(1)
    x, weight, past = torch.randn(2, 3, 5, generator=r), torch.randn(5, 4, generator=r), torch.randn(2, 3, 5, generator=r)
    pool = torch.cat([torch.zeros(1, 3, 5), past, torch.zeros(6, 3, 5)])
    out, pool = ops.causal_conv(x, weight, pool, i32(1, 2), i32([3, 4, 5], [6, 7, 8]), i32(9, 9), i32(3, 3), x.dtype)
    history = torch.cat([past, x], 1)
    torch.testing.assert_close(out, whole(history, weight)[:, 3:], rtol=1e-5, atol=1e-5)
    for b in range(2):
        for t in range(3):
            assert torch.equal(pool[3 + 3 * b + t], history[b, t + 1 : t + 4])
    assert torch.equal(pool[1:3], past)
