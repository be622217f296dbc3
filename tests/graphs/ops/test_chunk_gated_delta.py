"""graphs/ops/chunk_gated_delta.py: the chunked rule equals transformers', and stays accurate where keys repeat."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from npucompile.graphs import ops
from npucompile.graphs.errors import PrimitiveError

Operands = dict[str, torch.Tensor]


def draw(B: int, Q: int, Hk: int, H: int, Dk: int, Dv: int) -> Operands:
    r = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, Q, Hk, Dk, generator=r), dim=-1) for _ in range(2))
    g, beta = -torch.rand(B, Q, H, generator=r), torch.rand(B, Q, H, generator=r)
    return {
        "q": q,
        "k": k,
        "v": torch.randn(B, Q, H, Dv, generator=r),
        "g": g,
        "beta": beta,
        "state": torch.randn(B, H, Dv, Dk, generator=r),
    }


def packed(x: Operands) -> tuple[torch.Tensor, ...]:
    """Operands `qkv`, `ba`, `a_log` and `dt_bias` that have these q, k, v, g and beta; q and k of other lengths."""
    B, Q, Hk, _ = x["q"].shape
    H = x["v"].shape[2]
    a_log, dt_bias = torch.linspace(-1, 1, H), torch.linspace(0, 2, H)
    rate = -x["g"] / a_log.exp()
    a = (rate + torch.log(-torch.expm1(-rate))).clamp(min=-1e4) - dt_bias
    b = torch.logit(x["beta"]).clamp(-1e4, 1e4)
    ba = torch.cat([b.view(B, Q, Hk, -1), a.view(B, Q, Hk, -1)], -1)
    return torch.cat([x["q"] * 3, x["k"] * 0.5, x["v"].reshape(B, Q, Hk, -1)], -1), ba, a_log, dt_bias


def run(x: Operands, chunk: int, query_lens: list[int] | None = None, fresh: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, Q, H, Dv] and the stored states [B, H, Dv, Dk]."""
    B, Q = x["g"].shape[:2]
    zeros = torch.zeros_like(x["state"][:1])
    pool = torch.cat([zeros + float("nan"), x["state"], zeros.expand(B, -1, -1, -1)])
    read, write = torch.arange(1, B + 1, dtype=torch.int32), torch.arange(B + 1, 2 * B + 1, dtype=torch.int32)[:, None]
    num_computed_tokens = torch.full((B,), 0 if fresh else 3, dtype=torch.int32)
    valid = torch.tensor(query_lens or [Q] * B, dtype=torch.int32)
    out, stored = ops.chunk_gated_delta(*packed(x), pool, read, write, num_computed_tokens, valid, 1e-12, chunk)
    return out, stored[B + 1 :]


def token_by_token(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta` in f64 where it is not a state: outputs, and the state after the last token."""
    B, Q = x["g"].shape[:2]
    read, write = torch.arange(B, dtype=torch.int32), torch.arange(B * Q, dtype=torch.int32).view(B, Q)
    pool = torch.cat([x["state"], torch.zeros_like(x["state"][:1]).expand(B * Q, -1, -1, -1)])
    tokens = x["q"] * x["q"].shape[-1] ** -0.5, x["k"], x["v"], x["g"], x["beta"]
    out, stored = ops.gated_delta(*tokens, pool, read, write + B, torch.ones(B, dtype=torch.int32), torch.full((B,), Q, dtype=torch.int32))
    return out, stored[B:].view(B, Q, *x["state"].shape[1:])[:, -1]


def exact(x: Operands) -> torch.Tensor:
    """The rule as its paper states it, in f64."""
    q, k, v, g, beta, state = (x[n].double() for n in ("q", "k", "v", "g", "beta", "state"))
    share, outs = v.shape[2] // q.shape[2], []
    for t in range(q.shape[1]):
        qt, kt = (y[:, t].repeat_interleave(share, 1) for y in (q * q.shape[-1] ** -0.5, k))
        state = g[:, t].exp()[..., None, None] * state
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, kt))
        state = state + torch.einsum("bhv,bhk->bhvk", change, kt)
        outs.append(torch.einsum("bhvk,bhk->bhv", state, qt))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("Q", "chunk", "valid"), [(64, 64, 64), (64, 32, 64), (64, 16, 37), (32, 8, 32), (8, 8, 1), (5, 1, 4), (2, 2, 2)])
def test_chunks_are_transformers(Q: int, chunk: int, valid: int, fresh: bool) -> None:
    x = draw(2, Q, 2, 4, 8, 6)
    out, states = run(x, chunk, [valid, Q], fresh)
    for row, length in enumerate((valid, Q)):
        q, k, v, g, beta = (x[name][row : row + 1, :length] for name in ("q", "k", "v", "g", "beta"))
        start = None if fresh else x["state"][row : row + 1].transpose(-1, -2)
        want, after = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True)
        torch.testing.assert_close(out[row : row + 1, :length], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[row], after[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_chunks_are_token_by_token_and_so_are_their_gradients(chunk: int) -> None:
    results = []
    for form in (token_by_token, lambda x: run(x, chunk)):
        x = {name: value.requires_grad_() for name, value in draw(2, 16, 2, 4, 6, 5).items()}
        out, states = form(x)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        ((out * weight).sum() + states.sin().sum()).backward()
        # What changes the length of q and k alone has no gradient here.
        results.append((out, states, *(x[name].grad for name in ("v", "g", "beta", "state"))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("chunk", [32, 64])
def test_repeated_keys_keep_their_digits(chunk: int, noise: float) -> None:
    """beta = 1, no decay, 64 times the same key: the triangular system is the worst there is, its solution is benign."""
    x = draw(1, 64, 2, 4, 16, 8)
    x["k"] = torch.nn.functional.normalize(x["k"][:, :1] + noise * x["k"], dim=-1)
    x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.ones_like(x["beta"])
    torch.testing.assert_close(run(x, chunk)[0].double(), exact(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", [8, 64])
def test_strong_decay_overflows_nowhere(chunk: int) -> None:
    x = draw(1, 64, 1, 2, 4, 4)
    x["g"] = x["g"] * 300
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    out, states = run(leaves, chunk)
    torch.testing.assert_close(out.double(), exact(x), rtol=1e-4, atol=1e-5)
    (out.sum() + states.sum()).backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in leaves.values())


def test_a_bf16_pool_rounds_states_only_where_they_are_stored() -> None:
    x = draw(2, 8, 2, 4, 6, 5)
    x["state"] = x["state"].bfloat16().float()
    out, states = run(x, 8)
    x["state"] = x["state"].bfloat16()
    rounded_out, rounded = run(x, 8)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded_out, out)
    assert torch.equal(rounded, states.bfloat16())


def test_columns_that_are_no_heads_are_refused() -> None:
    x = draw(1, 4, 2, 4, 6, 5)
    qkv, *rest = packed(x)
    operands = (qkv[..., 1:], *rest, x["state"], *(torch.zeros(shape, dtype=torch.int32) for shape in ((1,), (1, 1), (1,), (1,))))
    with pytest.raises(PrimitiveError, match="has 21 columns in each of 2 key heads and states of 4 heads, 5 by 6; legal are 22 columns"):
        ops.chunk_gated_delta(*(operand.to("meta") for operand in operands), 1e-6, 4)
