"""Forms outside GE do to their pools what the functional ones return."""

from __future__ import annotations

import torch

from npucompile.lowering.ascend.operators import state as functional
from npucompile.lowering.ascend.operators.attention import with_host_lengths

BF16, I32 = torch.bfloat16, torch.int32


def test_keys_and_values_are_written_into_the_caches() -> None:
    key, value = torch.randn(3, 1, 16).to(BF16), torch.randn(3, 1, 16).to(BF16)
    caches, slots = [torch.randn(2, 4, 1, 16).to(BF16) for _ in range(2)], torch.tensor([5, -1, 2], dtype=I32)
    expected = functional.npu_scatter_pa_kv_cache_functional(key, value, *caches, slots, cache_mode="Norm")
    assert functional.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm") == ()
    assert all(torch.equal(cache, new) for cache, new in zip(caches, expected, strict=True))
    assert torch.equal(caches[0].flatten(0, 1)[5], key[0])


def test_states_are_written_into_the_pool() -> None:
    rows = [torch.randn(4, 1, 16).to(BF16) for _ in range(3)]
    state = torch.randn(5, 1, 16, 16).to(BF16)
    options = {
        "actual_seq_lengths": torch.tensor([2, 2], dtype=I32),
        "ssm_state_indices": torch.tensor([1, 2, 3, 4], dtype=I32),
        "scale": 1.0,
    }
    out, expected = functional.npu_recurrent_gated_delta_rule_functional(*rows, state, **options)
    before = state.clone()
    assert torch.equal(functional.npu_recurrent_gated_delta_rule(*rows, state, **options), out)
    assert torch.equal(state, expected)
    assert torch.equal(state[0], before[0])
    assert not torch.equal(state[1], before[1])


def test_lengths_are_lists_or_tensors() -> None:
    draw = torch.Generator().manual_seed(0)
    query, pool = torch.randn(2, 1, 1, 16, generator=draw).to(BF16), torch.randn(3, 8, 16, generator=draw).to(BF16)
    options = {"block_table": torch.tensor([[1], [2]], dtype=I32), "input_layout": "BSND", "block_size": 8}
    of_list, of_tensor = (
        with_host_lengths(query, pool, pool, actual_seq_lengths_kv=lengths, **options)[0] for lengths in ([3, 8], torch.tensor([3, 8]))
    )
    assert torch.equal(of_list, of_tensor)
    other = with_host_lengths(query, pool, pool, actual_seq_lengths_kv=[3, 2], **options)[0]
    assert torch.equal(of_list[0], other[0])
    assert not torch.equal(of_list[1], other[1])
