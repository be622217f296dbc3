"""models/mtp.py: a head begins with its token's half, and its norms are those of its family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npucompile.models import mtp

R = torch.Generator().manual_seed(0)
M, V = 8, 11


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_stream_is_the_token_beside_the_hidden_state(offset: float) -> None:
    names = ("norm_embedding", "norm_hidden", "input_norm")
    weights = {name: torch.randn(M, generator=R) for name in names}
    fc, embed, hidden = torch.randn(M, 2 * M, generator=R), torch.randn(V, M, generator=R), torch.randn(6, M, generator=R)
    head = {**weights, "fc": fc, "layer": {"input_norm": weights["input_norm"]}}
    tokens = torch.tensor([3, 1, 4, 1, 5, 9])
    cfg: Any = SimpleNamespace(rms_norm_eps=1e-5, norm_offset=offset)
    batch: Any = SimpleNamespace(tokens=tokens, size=2, q_len=3)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (M,), weights[name] + offset, 1e-5)

    want = torch.cat([norm(embed[tokens], "norm_embedding"), norm(hidden, "norm_hidden")], -1) @ fc.t()
    stream, normed = mtp.merged(cfg, head, embed, batch, {}, hidden)
    torch.testing.assert_close(stream, want)
    torch.testing.assert_close(normed, norm(want, "input_norm"))
