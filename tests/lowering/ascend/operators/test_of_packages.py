"""lowering/ascend/operators/of_packages.py: kernels equal torch's own functions, and refuse what the packages' kernels misread.

Whole steps are compared with the primitives' references in tests/lowering/ascend/test_ge_ops.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, silu

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import of_packages as kernels


@pytest.mark.parametrize(("accepted", "first"), [(1, 0), (3, 2), (9, 2), (0, 0)])
def test_a_convolution_begins_behind_the_accepted_tokens(accepted: int, first: int) -> None:
    torch.manual_seed(0)
    x, weight, state = torch.randn(1, 3, 16), torch.randn(4, 16), torch.randn(4, 5, 16)
    before = state.clone()
    out = kernels.causal_conv1d_update(x, weight, state, torch.tensor([2]), torch.tensor([accepted]))
    inputs = torch.cat([before[2, first : first + 3], x[0]])
    torch.testing.assert_close(out[0], silu(conv1d(inputs.t()[None], weight.t()[:, None], groups=16))[0].t())
    assert torch.equal(state[2], inputs[1:])
    assert torch.equal(state[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize(
    ("x", "state", "slots", "message"),
    [
        ((1, 3, 24), (4, 5, 24), [2], "24 channels, 3 tokens, 5 inputs a slot"),
        ((1, 3, 16), (4, 4, 16), [2], "at least 5 inputs"),
        ((1, 3, 16), (4, 5, 16), [4], r"slots \[4\] of 4"),
        ((2, 3, 16), (4, 5, 16), [1], "one slot for each of 2 sequences"),
    ],
)
def test_convolutions_that_the_operator_refuses(x, state, slots, message) -> None:
    with pytest.raises(LoweringError, match=message):
        kernels.causal_conv1d_update(
            torch.zeros(x), torch.zeros(4, x[-1]), torch.zeros(state), torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32)
        )


def test_gates_are_read_without_strides() -> None:
    wide, heads = torch.randn(4, 6), torch.zeros(3)
    with pytest.raises(LoweringError, match=r"b has strides \(6, 1\); legal are \(3, 1\)"):
        kernels.fused_gdn_gating(heads, wide[:, :3].contiguous(), wide[:, 3:], heads)


def test_rows_of_a_norm_may_lie_apart_and_their_values_may_not() -> None:
    x, weight, wide = torch.randn(4, 3), torch.randn(3), torch.randn(4, 6)
    want = torch.nn.functional.rms_norm(x, (3,), weight, 1e-6) * silu(wide[:, 3:])
    torch.testing.assert_close(kernels.rms_norm_gated(x, weight, wide[:, 3:], 1e-6), want)
    with pytest.raises(LoweringError, match=r"rows have strides \[\(6, 2\)\]; legal are values one behind the other"):
        kernels.rms_norm_gated(x, weight, wide[:, ::2], 1e-6)


def test_heads_are_read_in_rows_of_powers_of_two() -> None:
    x, weight, angles = torch.randn(3, 6 * 8), torch.ones(8), torch.randn(3, 4)
    q, k, v, gate = kernels.split_qkv_rmsnorm_rope(x, weight, weight, angles, 2, 1, 1e-6)
    assert [value.shape[1] for value in (q, k, v, gate)] == [16, 8, 8, 16]
    assert torch.equal(v, x[:, 40:])
    # Beyond the rotated channels a query is its norm.
    unit = torch.nn.functional.rms_norm(x[:, :32].view(3, 2, 2, 8)[:, :, 0], (8,), eps=1e-6)
    torch.testing.assert_close(q.view(3, 2, 8)[..., 4:], unit[..., 4:])
    with pytest.raises(LoweringError, match=r"qkv is \(3, 48\); the other operands make \(3, 64\) legal"):
        kernels.split_qkv_rmsnorm_rope(x, weight, weight, angles, 3, 1, 1e-6)
    with pytest.raises(LoweringError, match=r"sizes are \{'q_heads': 3\}; legal are powers of two"):
        kernels.split_qkv_rmsnorm_rope(torch.randn(3, 64), weight, weight, angles, 3, 1, 1e-6)
    with pytest.raises(LoweringError, match=r"strides are {'qkv': \(96, 1\)}; legal are rows one behind the other"):
        kernels.split_qkv_rmsnorm_rope(torch.randn(3, 96)[:, :48], weight, weight, angles, 2, 1, 1e-6)
    with pytest.raises(LoweringError, match="16 channels of a head turn, and a head has 8; legal are at most 8"):
        kernels.split_qkv_rmsnorm_rope(x, weight, weight, torch.randn(3, 16), 2, 1, 1e-6)


def test_parts_of_a_projection_are_powers_of_two() -> None:
    qkv, z, b, a = kernels.split_qkvzba(torch.arange(24.0).view(2, 12), 1, 4, 1)
    assert (qkv[1].tolist(), z[1].tolist()) == ([12.0, 13.0, 14.0, 15.0, 16.0, 17.0], [18.0, 19.0, 20.0, 21.0])
    assert (b.tolist(), a.tolist()) == ([[10.0], [22.0]], [[11.0], [23.0]])
    with pytest.raises(LoweringError, match=r"sizes are \{'value_width': 3\}; legal are powers of two"):
        kernels.split_qkvzba(torch.zeros(2, 10), 1, 3, 1)


def test_queries_and_keys_are_normed_apart_from_what_follows() -> None:
    x, weight = torch.randn(3, 28), torch.full((8,), 0.5)
    q, k, rest = kernels.split_qk_norm(x[:, :20].contiguous(), weight, weight * 2, 1e-6)
    torch.testing.assert_close(q, torch.nn.functional.rms_norm(x[:, :8], (8,), weight, 1e-6))
    torch.testing.assert_close(k, torch.nn.functional.rms_norm(x[:, 8:16], (8,), None, 1e-6))
    assert torch.equal(rest, x[:, 16:20])
    with pytest.raises(LoweringError, match=r"sizes are \{'rest': 12\}; legal are powers of two"):
        kernels.split_qk_norm(x, weight, weight, 1e-6)
    with pytest.raises(LoweringError, match="x has 65536 rows; legal are at most 65535"):
        kernels.split_qk_norm(torch.zeros(65536, 3), torch.ones(1), torch.ones(1), 1e-6)
