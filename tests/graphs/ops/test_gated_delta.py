"""graphs/ops/gated_delta.py: the rule token by token equals transformers', and starts from any slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from npucompile.graphs import ops

Operands = dict[str, torch.Tensor]


def draw(B: int, Q: int, Hk: int, H: int, Dk: int, Dv: int, seed: int = 0) -> Operands:
    r = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(B, Q, Hk, Dk, generator=r), dim=-1) for _ in range(2))
    g, beta = -torch.rand(B, Q, H, generator=r), torch.rand(B, Q, H, generator=r)
    state = torch.randn(B, H, Dv, Dk, generator=r)
    return {"q": q, "k": k, "v": torch.randn(B, Q, H, Dv, generator=r), "g": g, "beta": beta, "state": state}


def run(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, Q, H, Dv] and the stored states [B, Q, H, Dv, Dk]."""
    B, Q = x["g"].shape[:2]
    zeros = torch.zeros_like(x["state"][:1])
    pool = torch.cat([zeros + float("nan"), x["state"], zeros.expand(B * Q, -1, -1, -1)])
    read, write = torch.arange(1, B + 1, dtype=torch.int32), torch.arange(B + 1, B + 1 + B * Q, dtype=torch.int32).view(B, Q)
    tokens = tuple(x[name] for name in ("q", "k", "v", "g", "beta"))
    counts = torch.full((B,), 3, dtype=torch.int32), torch.full((B,), Q, dtype=torch.int32)
    out, stored = ops.gated_delta(*tokens, pool, read, write, *counts)
    return out, stored[B + 1 :].view(B, Q, *x["state"].shape[1:])


def oracle(rule: Any, x: Operands, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers scales queries by 1/sqrt(Dk) itself and its states are [.., Dk, Dv]; here queries are scaled and states [.., Dv, Dk]."""
    scale, start = x["q"].shape[-1] ** 0.5, options.pop("initial_state")
    turned = None if start is None else start.transpose(-1, -2)
    out, after = rule(x["q"] * scale, x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=turned, output_final_state=True, **options)
    return out, after.transpose(-1, -2)


SIZES = [(1, 1, 1, 1, 1, 1), (2, 3, 2, 4, 3, 5), (3, 5, 1, 3, 8, 7), (1, 4, 2, 2, 16, 8)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_token_by_token_is_transformers(sizes: tuple[int, ...]) -> None:
    x = draw(*sizes)
    out, states = run(x)
    want, _ = oracle(torch_recurrent_gated_delta_rule, x, initial_state=x["state"])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    for t in range(sizes[1]):
        part = {name: value[:, : t + 1] if name != "state" else value for name, value in x.items()}
        _, after = oracle(torch_recurrent_gated_delta_rule, part, initial_state=x["state"])
        torch.testing.assert_close(states[:, t], after, rtol=1e-5, atol=1e-5)


def test_going_on_from_a_slot_is_never_having_gone_further() -> None:
    """Rollback is an index: after a step of 4 tokens, the slot of token j starts the same future as a step of j+1 tokens."""
    x, future = draw(2, 4, 2, 4, 6, 5), draw(2, 3, 2, 4, 6, 5, seed=1)
    _, states = run(x)
    for j in range(4):
        short = {name: value[:, : j + 1] if name != "state" else value for name, value in x.items()}
        _, alone = run(short)
        one, other = (run({**future, "state": state})[0] for state in (states[:, j], alone[:, -1]))
        assert torch.equal(one, other)
