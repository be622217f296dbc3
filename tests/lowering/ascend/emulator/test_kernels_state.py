"""lowering/ascend/emulator/kernels_state.py: caches equal plain loops, attention torch's, the delta rule transformers'."""

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator import kernels_state as state

FLOATS = [torch.float32, torch.bfloat16]
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.2, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scatter_pa_writes_pages_and_leaves_the_operands(dtype: torch.dtype) -> None:
    k, v = torch.randn(4, 2, 3).to(dtype), torch.randn(4, 2, 3).to(dtype)
    kc, vc = torch.randn(5, 8, 2, 3).to(dtype), torch.randn(5, 8, 2, 3).to(dtype)
    before = kc.clone()
    slots = torch.tensor([17, -1, 3, 39], dtype=torch.int32)
    new_k, new_v = state.npu_scatter_pa_kv_cache_functional(k, v, kc, vc, slots, cache_mode="Norm")
    want_k, want_v = kc.clone(), vc.clone()
    for token, slot in ((0, 17), (2, 3), (3, 39)):
        want_k[slot // 8, slot % 8], want_v[slot // 8, slot % 8] = k[token], v[token]
    assert torch.equal(new_k, want_k)
    assert torch.equal(new_v, want_v)
    assert torch.equal(kc, before)


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
    near(pool, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [NAN, NAN]]))


def test_scatter_nd_refuses_places_outside() -> None:
    with pytest.raises(LoweringError, match="indices from -1 to 0 are not all below the size 4"):
        state.npu_scatter_nd_update_(torch.zeros(4), torch.tensor([[0], [-1]]), torch.ones(2))
    with pytest.raises(LoweringError, match=r"updates is \(2, 3\); the other operands make \(2, 2\)"):
        state.npu_scatter_nd_update_(torch.zeros(4, 2), torch.tensor([[0], [1]]), torch.ones(2, 3))


class Paged:
    """Three sequences of 3, 1 and 4 queries over 13, 8 and 4 keys, in shuffled pages of 8, the rest of the pool NaN."""

    def __init__(self, dtype: torch.dtype, counts: tuple[int, ...] = (3, 1, 4)) -> None:
        self.counts, self.query_lens, self.H, self.G, self.D = counts, (13, 8, 4), 6, 2, 64
        self.q = torch.randn(sum(counts), self.H, self.D).to(dtype)
        self.k = [torch.randn(n, self.G, self.D).to(dtype) for n in self.query_lens]
        self.v = [torch.randn(n, self.G, self.D).to(dtype) for n in self.query_lens]
        self.table = torch.tensor([[4, 1], [2, 0], [3, 0]], dtype=torch.int32)
        self.caches = [torch.full((6, 8, self.G, self.D), NAN, dtype=dtype) for _ in "kv"]
        for cache, rows in zip(self.caches, (self.k, self.v), strict=True):
            for pages, values in zip(self.table, rows, strict=True):
                for i, value in enumerate(values):
                    cache[pages[i // 8], i % 8] = value

    def expected(self, causal: bool = True) -> torch.Tensor:
        out, start = [], 0
        for n, k, v in zip(self.counts, self.k, self.v, strict=True):
            q, k, v = (t.double().transpose(0, 1)[None] for t in (self.q[start : start + n], k, v))
            k, v = k.repeat_interleave(self.H // self.G, 1), v.repeat_interleave(self.H // self.G, 1)
            mask = torch.zeros(n, k.shape[2], dtype=torch.bool)
            for i in range(n):
                mask[i, : k.shape[2] - n + i + 1 if causal else None] = True
            out.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)[0].transpose(0, 1))
            start += n
        return torch.cat(out)

    def call(self, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = {
            "atten_mask": state.causal_mask(),
            "actual_seq_lengths": torch.tensor(self.counts).cumsum(0),
            "actual_seq_lengths_kv": torch.tensor(self.query_lens),
            "block_table": self.table,
            "num_heads": self.H,
            "num_key_value_heads": self.G,
            "scale": 0.3,
            "input_layout": "TND",
            "sparse_mode": 3,
            "block_size": 8,
        }
        query = changes.pop("query", self.q)
        k, v = changes.pop("caches", [c.flatten(2) for c in self.caches])
        return state.npu_fused_infer_attention_score(query, k, v, **(arguments | changes))


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_is_right_aligned_and_grouped(dtype: torch.dtype) -> None:
    paged = Paged(dtype)
    out, lse = paged.call()
    near(out, paged.expected())
    assert (out.dtype, lse.shape, lse.dtype) == (dtype, (0,), torch.float32)


def test_attention_reads_caches_by_head_too() -> None:
    paged = Paged(torch.float32)
    near(paged.call(caches=[c.transpose(1, 2) for c in paged.caches])[0], paged.expected())


def test_attention_without_a_mask_sees_every_key() -> None:
    paged = Paged(torch.float32, (1, 1, 1))
    out, lse = paged.call(sparse_mode=0, atten_mask=None, softmax_lse_flag=True)
    near(out, paged.expected(causal=False))
    k = paged.k[1].repeat_interleave(3, 1)
    near(lse[1, :, 0], (paged.q[1] * k * 0.3).sum(-1).logsumexp(0))
    assert lse.shape == (3, 6, 1)


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_attention_takes_padded_sequences(layout: str) -> None:
    paged = Paged(torch.float32)
    query, start = torch.randn(3, 4, 6, 64), 0
    wanted = torch.full_like(query, NAN)
    for b, n in enumerate(paged.counts):
        query[b, :n], wanted[b, :n] = paged.q[start : start + n], paged.expected()[start : start + n]
        start += n
    shaped = query if layout == "BSND" else query.flatten(2)
    out, lse = paged.call(query=shaped, input_layout=layout, actual_seq_lengths=torch.tensor(paged.counts), softmax_lse_flag=True)
    assert out.shape == shaped.shape
    near(out, wanted.view(shaped.shape))
    assert lse.shape == (3, 6, 4, 1)
    assert lse[0, :, 3].isnan().all()


def test_queries_beyond_the_sequences_and_blind_ones_are_undefined() -> None:
    paged = Paged(torch.float32)
    out, _ = paged.call(query=torch.cat((paged.q, torch.zeros(2, 6, 64))))
    near(out, torch.cat((paged.expected(), torch.full((2, 6, 64), NAN))))
    short, _ = paged.call(actual_seq_lengths_kv=torch.tensor([13, 8, 2]))
    assert short[4:6].isnan().all()
    assert not short[6:].isnan().any()


def test_keys_a_query_does_not_see_have_no_part_in_it() -> None:
    paged = Paged(torch.float32)
    wanted = paged.call()[0]
    for cache in paged.caches:
        cache[1, 4] = NAN  # key 12 of sequence 0, which its last query alone sees
    out, _ = paged.call()
    near(out[:2], wanted[:2])
    assert out[2].isnan().all()
    near(out[3:], wanted[3:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_layout": "BNSD"}, "input_layout is 'BNSD'; legal is 'TND'"),
        ({"atten_mask": torch.ones(3, 3, dtype=torch.bool)}, r"atten_mask \(3, 3\); legal is 0 and none, or 3 and the compressed one"),
        ({"atten_mask": torch.ones(2048, 2048, dtype=torch.bool)}, "true above the diagonal"),
        ({"atten_mask": None}, "atten_mask is absent"),
        ({"sparse_mode": 0}, "sparse_mode 0, atten_mask"),
        ({"block_size": 16}, "block_size 16 and 2 heads"),
        ({"actual_seq_lengths": torch.tensor([3, 1, 4])}, r"query rows \[\(0, 3\), \(3, 1\), \(1, 4\)\]"),
        ({"actual_seq_lengths_kv": torch.tensor([13, 8])}, r"key lengths \[13, 8\]"),
        ({"actual_seq_lengths_kv": torch.tensor([17, 8, 4])}, "17 keys in a block_table row of 2 pages of 8"),
        ({"actual_seq_lengths": torch.tensor([3, 4, 8], dtype=torch.int32)}, "actual_seq_lengths is .*int32"),
        ({"block_table": None}, "block_table is absent"),
        ({"query_rope": torch.zeros(1)}, "query_rope=.* has no CPU kernel"),
    ],
)
def test_attention_refuses_what_the_device_would_misread(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        Paged(torch.float32).call(**changes)


@pytest.mark.parametrize(
    ("layout", "H", "G", "D", "message"),
    [
        ("TND", 4, 2, 256, r"heads of width 256 in layout TND with a block_table; legal are \(64, 128, 192\), or layout BSH or BSND"),
        ("BSH", 4, 2, 528, "2 key heads of width 528; legal are .* of width at most 512"),
        ("BSND", 65, 1, 16, "65 query heads, 1 key heads of width 16; legal are .* at most 64 a key head"),
        ("BSH", 260, 130, 16, "260 query heads, .*; legal are at most 256 heads"),
        ("BSH", 256, 256, 256, "legal are .* key rows of at most 65535"),
    ],
)
def test_attention_refuses_widths_that_the_tiling_refuses(layout: str, H: int, G: int, D: int, message: str) -> None:
    query = {"TND": torch.zeros(1, H, D), "BSND": torch.zeros(1, 1, H, D), "BSH": torch.zeros(1, 1, H * D)}[layout]
    cache = torch.zeros(1, 1, G * D)
    with pytest.raises(LoweringError, match=message):
        state.npu_fused_infer_attention_score(
            query,
            cache,
            cache,
            actual_seq_lengths=torch.tensor([1]),
            actual_seq_lengths_kv=torch.tensor([1]),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            num_heads=H,
            num_key_value_heads=G,
            input_layout=layout,
            block_size=1,
        )


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
            near(out[rows], o)
            want[delta.slots[start + length - 1]] = last.to(dtype)
    near(pool, want)


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
