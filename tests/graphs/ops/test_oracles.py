"""The small primitives equal transformers' modules, or the plain loops that their docstrings describe."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from npucompile.graphs import ops
from npucompile.models.attention import rotated_order

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def i32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- norms, gates, rotation: transformers ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms(dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 7).to(dtype), randn(5, 7, seed=1).to(dtype), randn(7, seed=2).to(dtype)
    norm = theirs.Qwen3_5RMSNorm(7, 1e-3).to(dtype)
    norm.weight.data.copy_(weight)
    close(ops.rms_norm(x, weight, 1e-3, 1.0), norm(x).detach())
    close(ops.rms_norm(x, 1 + weight.float(), 1e-3, 0.0), norm(x).detach())
    y, total = ops.add_rms_norm(x, residual, weight, 1e-3, 1.0)
    assert torch.equal(total, x + residual)
    close(y, norm(x + residual).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    x, gate, weight = randn(4, 2, 7).to(dtype), randn(4, 2, 7, seed=1).to(dtype), randn(7, seed=2).to(dtype)
    norm = theirs.Qwen3_5RMSNormGated(7, 1e-3).to(dtype)
    norm.weight.data.copy_(weight)
    close(ops.gated_rms_norm(x, gate, weight, 1e-3), norm(x, gate).detach())


def test_l2_norm() -> None:
    x = randn(2, 3, 2, 7)
    close(ops.l2_norm(x, 1e-2, 0.5), 0.5 * theirs.l2norm(x, eps=1e-2))


def test_delta_gates() -> None:
    a, b, a_log, dt_bias = randn(2, 3, 4), randn(2, 3, 4, seed=3), randn(4, seed=1), randn(4, seed=2)
    decay, beta = ops.delta_gates(a, b, a_log, dt_bias)
    close(decay, -a_log.exp() * torch.log1p((a + dt_bias).exp()))
    close(beta, 1 / (1 + (-b).exp()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "factor"), [(16, 0.25), (16, 1.0), (10, 0.6)])
def test_rope(head_dim: int, factor: float, dtype: torch.dtype) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    config = Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=parameters)
    q, k, at = randn(6, 4, head_dim).to(dtype), randn(6, 2, head_dim, seed=1).to(dtype), i32(0, 1, 2, 77, 500, 8191)
    cos, sin = theirs.Qwen3_5TextRotaryEmbedding(config)(q.float(), at[None])
    want = theirs.apply_rotary_pos_emb(q[None].float(), k[None].float(), cos, sin, unsqueeze_dim=2)
    angles = ops.rope_angles(at, int(head_dim * factor), 1e4)
    order = rotated_order(head_dim, int(head_dim * factor))
    for x, rotated in zip((q, k), want, strict=True):
        close(ops.rope(x[..., order], *angles).float(), rotated[0][..., order].to(dtype).float(), 1e-5 if dtype == torch.float32 else 1e-2)


# --- experts: loops ---


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize(("T", "E", "X"), [(1, 9, 2), (5, 4, 2), (3, 2, 1), (2, 16, 4)])
def test_moe_experts(T: int, E: int, X: int, backend: str) -> None:
    M, F = 7, 5
    x, weights = randn(T, M), randn(T, X, seed=1).abs()
    gate_up, down = randn(E, 2, F, M, seed=2), randn(E, M, F, seed=3)
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:X] for t in range(T)]).int()
    want = torch.zeros(T, M)
    for t in range(T):
        for choice in range(X):
            e = int(ids[t, choice])
            want[t] += weights[t, choice] * (down[e] @ (silu(gate_up[e, 0] @ x[t]) * (gate_up[e, 1] @ x[t])))
    close(ops.moe_experts.lower_for(backend)(x, weights, ids, gate_up, down), want, 1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_moe_route(renormalise: bool) -> None:
    logits = randn(5, 7)
    weights, ids = ops.moe_route(logits, 3, renormalise)
    for row, got, chosen in zip(logits.tolist(), weights, ids.tolist(), strict=True):
        ranked = sorted(range(7), key=lambda e: -row[e])[:3]
        assert chosen == ranked
        share = torch.tensor(row).softmax(0)[ranked]
        close(got, share / share.sum() if renormalise else share)


def test_swiglu_linear() -> None:
    x, weight = randn(5, 7), randn(2, 3, 7, seed=1)
    close(ops.swiglu_linear(x, weight), silu(x @ weight[0].T) * (x @ weight[1].T), 1e-5)


# --- where things lie: loops ---


def test_rows() -> None:
    x, table = randn(6, 4), randn(9, 4, seed=1)
    close(ops.linear(x, table), torch.einsum("tk,nk->tn", x, table), 1e-5)
    assert torch.equal(ops.embed(i32(3, 0, 8), table), torch.stack([table[3], table[0], table[8]]))
    assert torch.equal(ops.last_rows(x, i32(2, 0)), torch.stack([x[1], x[3]]))
    assert torch.equal(ops.last_rows(x, i32(3, 1)), torch.stack([x[2], x[3]]))


def test_positions_and_slot_mapping() -> None:
    num_computed_tokens, query_lens, table, P, Q = [6, 0, 3, 11], [2, 0, 3, 1], [[4, 2, 1], [0, 0, 0], [3, 5, 6], [7, 8, 9]], 4, 3
    assert ops.positions(i32(*num_computed_tokens), Q).tolist() == [s + t for s in num_computed_tokens for t in range(Q)]
    got = ops.slot_mapping(i32(*num_computed_tokens), i32(*query_lens), i32(*table), P, Q).view(4, Q).tolist()
    for row, start, length, pages in zip(got, num_computed_tokens, query_lens, table, strict=True):
        at = range(start, start + Q)
        assert row[:length] == [pages[j // P] * P + j % P for j in at[:length]]
        assert all(0 <= slot < P for slot in row[length:]), "padding lies in the null page"


def test_cache_write() -> None:
    pools, new, slots = (randn(3, 4, 2, 5), randn(3, 4, 2, 5, seed=1)), (randn(3, 2, 5, seed=2), randn(3, 2, 5, seed=3)), i32(11, 4, 0)
    for pool, rows, got in zip(pools, new, ops.cache_write(*pools, *new, slots), strict=True):
        want = pool.clone()
        for row, slot in zip(rows, slots.tolist(), strict=True):
            want[slot // 4, slot % 4] = row
        assert torch.equal(got, want)
