"""lowering/ascend/operators/state.py: caches equal plain loops, the delta rule transformers'."""

import pytest
import torch
from support import ge_calls as gc
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import state

FLOATS = [torch.float32, torch.bfloat16]
NAN = float("nan")


def test_scatter_pa_leaves_twice_written_slots_undefined() -> None:
    k, kc = torch.ones(3, 1, 2), torch.zeros(2, 4, 1, 2)
    new, _ = state.npu_scatter_pa_kv_cache_functional(k, k, kc, kc, torch.tensor([5, 1, 5]), cache_mode="Norm")
    assert new[1, 1].isnan().all()
    assert new.nan_to_num(0).sum() == 2


def test_scatter_pa_refuses_other_layouts() -> None:
    k, kc, slots = torch.ones(1, 1, 2), torch.zeros(2, 4, 1, 2), torch.tensor([8])
    with pytest.raises(LoweringError, match="cache_mode is 'PA_NZ'; legal is 'Norm'"):
        state.npu_scatter_pa_kv_cache_functional(k, k, kc, kc, slots)
    with pytest.raises(LoweringError, match="slots from 8 to 8 are not all in a pool of 8"):
        state.npu_scatter_pa_kv_cache_functional(k, k, kc, kc, slots, cache_mode="Norm")
    with pytest.raises(LoweringError, match=r"key is \(1, 1, 2\) torch.float32; legal is a tensor of .*bfloat16"):
        state.npu_scatter_pa_kv_cache_functional(k, k, kc.bfloat16(), kc, slots, cache_mode="Norm")


@pytest.mark.parametrize("depth", [1, 2])
def test_scatter_nd_writes_the_named_places(depth: int) -> None:
    pool, before = torch.randn(4, 3, 2), torch.zeros(4, 3, 2)
    before.copy_(pool)
    at = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)[:, :depth]
    rows = torch.randn(2, *pool.shape[depth:])
    want = pool.clone()
    for place, row in zip(at.tolist(), rows, strict=True):
        want[tuple(place)] = row
    assert torch.equal(state.npu_scatter_nd_update(pool, at, rows), want)
    assert torch.equal(pool, before)
    assert state.npu_scatter_nd_update_(pool, at, rows) is pool
    assert torch.equal(pool, want)


def test_scatter_nd_takes_indices_of_any_rank_and_marks_duplicates() -> None:
    pool, at = torch.zeros(4, 2), torch.tensor([[[1], [3]], [[0], [3]]])
    state.npu_scatter_nd_update_(pool, at, torch.ones(2, 2, 2))
    gc.near(pool, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [NAN, NAN]]))


def test_scatter_nd_refuses_places_outside() -> None:
    with pytest.raises(LoweringError, match="indices from -1 to 0 are not all below the size 4"):
        state.npu_scatter_nd_update_(torch.zeros(4), torch.tensor([[0], [-1]]), torch.ones(2))
    with pytest.raises(LoweringError, match=r"updates is \(2, 3\); the other operands make \(2, 2\)"):
        state.npu_scatter_nd_update_(torch.zeros(4, 2), torch.tensor([[0], [1]]), torch.ones(2, 3))


class Delta:
    """Two sequences of 3 and 2 tokens, 2 key heads, 4 value heads, Dk 6, Dv 5, in a pool of 9 states."""

    def __init__(self, dtype: torch.dtype, extra: int = 0) -> None:
        T = 5 + extra
        self.q, self.k = (normalize(torch.randn(T, 2, 6), dim=-1).to(dtype) for _ in "qk")
        self.v, self.beta, self.g = torch.randn(T, 4, 5).to(dtype), torch.rand(T, 4).to(dtype), -torch.rand(T, 4)
        self.pool = torch.randn(9, 4, 5, 6).to(dtype)
        self.slots = torch.tensor([7, 2, 5, 0, 8] + [1] * extra, dtype=torch.int32)
        self.options = {
            "beta": self.beta,
            "scale": 0.7,
            "actual_seq_lengths": torch.tensor([3, 2], dtype=torch.int32),
            "ssm_state_indices": self.slots,
            "num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32),
            "g": self.g,
        }

    def call(self, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        return state.npu_recurrent_gated_delta_rule_functional(self.q, self.k, self.v, self.pool, **(self.options | changes))

    def oracle(self, first: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [L, Hv, Dv] and the state after the rows [Hv, Dv, Dk]; transformers scales q by Dk ** -0.5 itself."""
        q, k = (x[rows].float().repeat_interleave(2, 1)[None] for x in (self.q, self.k))
        out, last = torch_recurrent_gated_delta_rule(
            q * 0.7 * 6**0.5,
            k,
            self.v[rows].float()[None],
            g=self.g[rows][None],
            beta=self.beta[rows].float()[None],
            initial_state=self.pool[first].float().transpose(-1, -2)[None],
            output_final_state=True,
        )
        return out[0], last[0].transpose(-1, -2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_delta_rule_is_transformers_with_the_state_transposed(dtype: torch.dtype) -> None:
    delta = Delta(dtype)
    before = delta.pool.clone()
    out, pool = delta.call()
    assert torch.equal(delta.pool, before)
    assert (out.dtype, pool.dtype) == (dtype, dtype)
    want = before.clone()
    for start, count, first in ((0, 3, 2), (3, 2, 0)):
        for length in range(1, count + 1):
            rows = slice(start, start + length)
            o, last = delta.oracle(first, rows)
            gc.near(out[rows], o)
            want[delta.slots[start + length - 1]] = last.to(dtype)
    gc.near(pool, want)


def test_delta_rule_defaults() -> None:
    delta = Delta(torch.float32)
    ones, zeros = torch.ones(5, 4), torch.zeros(5, 4)
    out, pool = delta.call(beta=None, g=None, scale=None, num_accepted_tokens=None)
    same = delta.call(beta=ones, g=zeros, scale=6**-0.5, num_accepted_tokens=torch.ones(2, dtype=torch.int32))
    assert torch.equal(out, same[0])
    assert torch.equal(pool, same[1])
    assert not torch.equal(out, delta.call()[0])


def test_delta_rule_rows_beyond_the_sequences_are_undefined() -> None:
    out, pool = Delta(torch.float32, extra=2).call()
    assert out[5:].isnan().all()
    assert not out[:5].isnan().any()
    assert not pool.isnan().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted_tokens": torch.tensor([4, 1], dtype=torch.int32)}, "3 tokens, 4 accepted, from row 0 of 5"),
        ({"actual_seq_lengths": torch.tensor([3, 3], dtype=torch.int32)}, "3 tokens, 1 accepted, from row 3 of 5"),
        ({"ssm_state_indices": torch.zeros(2, dtype=torch.int32)}, r"ssm_state_indices is \(2,\)"),
        ({"ssm_state_indices": torch.zeros(5, dtype=torch.int64)}, "ssm_state_indices is .*int64"),
        ({"g": torch.zeros(5, 4, dtype=torch.bfloat16)}, "g is .*bfloat16"),
        ({"gk": torch.zeros(5, 4)}, "gk=.* has no CPU kernel"),
    ],
)
def test_delta_rule_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        Delta(torch.float32).call(**changes)


def test_delta_rule_takes_eight_tokens_and_a_state_of_its_dtype() -> None:
    delta = Delta(torch.float32, extra=4)
    slots = torch.arange(9, dtype=torch.int32)
    delta.call(ssm_state_indices=slots, actual_seq_lengths=torch.tensor([8, 1], dtype=torch.int32))
    with pytest.raises(LoweringError, match="9 tokens, 1 accepted"):
        delta.call(actual_seq_lengths=torch.tensor([9], dtype=torch.int32), num_accepted_tokens=None)
    delta.pool = delta.pool.bfloat16()
    with pytest.raises(LoweringError, match=r"state is .*bfloat16; legal is a tensor of .*float32"):
        delta.call()


def test_the_rule_of_vllm_ascend_is_the_same_with_its_lengths_and_a_float32_state() -> None:
    delta = Delta(torch.bfloat16)
    pool = delta.pool.float()
    lengths = torch.tensor([0, 3, 2], dtype=torch.int32)
    out = state.vllm_recurrent_gated_delta_rule(delta.q, delta.k, delta.v, pool, **(delta.options | {"actual_seq_lengths": lengths}))
    want, states = delta.call()
    assert torch.equal(out, want)
    gc.near(pool.bfloat16(), states)
    assert not torch.equal(pool, states.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "scale is absent"),
        ({"actual_seq_lengths": torch.tensor([0, 3, 3], dtype=torch.int32)}, "3 tokens, 1 accepted, from row 3 of 5"),
        ({"actual_seq_lengths": torch.tensor([3, 2, 1], dtype=torch.int32)}, "2 tokens, 2 accepted, from row 3 of 5|legal is up to 16"),
    ],
)
def test_the_rule_of_vllm_ascend_refuses(changes: dict[str, object], message: str) -> None:
    delta = Delta(torch.float32)
    with pytest.raises(LoweringError, match=message):
        state.vllm_recurrent_gated_delta_rule(delta.q, delta.k, delta.v, delta.pool, **(delta.options | changes))


def test_the_chunked_rule_is_the_recurrent_one_over_whole_sequences() -> None:
    delta = Delta(torch.float32)
    options = {name: delta.options[name] for name in ("beta", "scale", "actual_seq_lengths", "g")}
    out, last = state.npu_chunk_gated_delta_rule(delta.q, delta.k, delta.v, initial_state=delta.pool[[2, 0]], **options)
    want, states = delta.call()
    gc.near(out, want)
    gc.near(last, states[[5, 8]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial_state": torch.zeros(2, 4, 5, 6).bfloat16()}, "initial_state is .*bfloat16"),
        ({"initial_state": None}, "initial_state is absent"),
        ({"beta": None}, "beta is absent"),
        ({"actual_seq_lengths": torch.tensor([3, 1], dtype=torch.int32)}, r"\[3, 1\] tokens of 5"),
    ],
)
def test_the_chunked_rule_refuses(changes: dict[str, object], message: str) -> None:
    delta = Delta(torch.float32)
    options = {name: delta.options[name] for name in ("beta", "scale", "actual_seq_lengths", "g")} | {"initial_state": delta.pool[:2]}
    with pytest.raises(LoweringError, match=message):
        state.npu_chunk_gated_delta_rule(delta.q, delta.k, delta.v, **(options | changes))
