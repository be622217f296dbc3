"""lowering/ascend/operators/attention.py: attention over pages equals torch's, with a rotary part beside the latents too."""

import pytest
import torch
from support import ge_calls as gc
from torch.nn.functional import scaled_dot_product_attention

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import attention as kernels

FLOATS = [torch.float32, torch.bfloat16]
NAN = float("nan")


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

    def call(self, **changes: object) -> torch.Tensor:
        arguments = {
            "atten_mask": kernels.causal_mask(),
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
        return kernels.npu_fused_infer_attention_score(query, k, v, **(arguments | changes))[0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_is_right_aligned_and_grouped(dtype: torch.dtype) -> None:
    paged = Paged(dtype)
    out = paged.call()
    gc.near(out, paged.expected())
    assert out.dtype == dtype
    gc.near(paged.call(caches=[cache.transpose(1, 2) for cache in paged.caches]), paged.expected())


def test_attention_without_a_mask_sees_every_key() -> None:
    paged = Paged(torch.float32, (1, 1, 1))
    gc.near(paged.call(sparse_mode=0, atten_mask=None), paged.expected(causal=False))


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_attention_takes_padded_sequences(layout: str) -> None:
    paged = Paged(torch.float32)
    query, start = torch.randn(3, 4, 6, 64), 0
    wanted = torch.full_like(query, NAN)
    for b, n in enumerate(paged.counts):
        query[b, :n], wanted[b, :n] = paged.q[start : start + n], paged.expected()[start : start + n]
        start += n
    shaped = query if layout == "BSND" else query.flatten(2)
    gc.near(paged.call(query=shaped, input_layout=layout, actual_seq_lengths=torch.tensor(paged.counts)), wanted.view(shaped.shape))


def test_queries_beyond_the_sequences_and_blind_ones_are_undefined() -> None:
    paged = Paged(torch.float32)
    out = paged.call(query=torch.cat((paged.q, torch.zeros(2, 6, 64))))
    gc.near(out, torch.cat((paged.expected(), torch.full((2, 6, 64), NAN))))
    short = paged.call(actual_seq_lengths_kv=torch.tensor([13, 8, 2]))
    assert short[4:6].isnan().all()
    assert not short[6:].isnan().any()


def test_keys_a_query_does_not_see_have_no_part_in_it() -> None:
    paged = Paged(torch.float32)
    wanted = paged.call()
    for cache in paged.caches:
        cache[1, 4] = NAN  # key 12 of sequence 0, which its last query alone sees
    out = paged.call()
    gc.near(out[:2], wanted[:2])
    assert out[2].isnan().all()
    gc.near(out[3:], wanted[3:])


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
        ({"query_rope": torch.zeros(1)}, "key_rope is absent"),
        ({"pse_shift": torch.zeros(1)}, "pse_shift=.* has no CPU kernel"),
        ({"softmax_lse_flag": True}, "softmax_lse_flag=True has no CPU kernel"),
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
        kernels.npu_fused_infer_attention_score(
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


def test_lengths_are_lists_or_tensors() -> None:
    paged = Paged(torch.float32)
    keys = [cache.flatten(2) for cache in paged.caches]
    options = {"block_table": paged.table, "num_heads": 6, "num_key_value_heads": 2, "input_layout": "BSND", "block_size": 8}
    of_list, of_tensor, other = (
        kernels.with_host_lengths(paged.q[:3, None], *keys, actual_seq_lengths_kv=lengths, **options)[0]
        for lengths in ([13, 8, 4], torch.tensor([13, 8, 4]), [13, 8, 2])
    )
    assert torch.equal(of_list, of_tensor)
    assert torch.equal(of_list[:2], other[:2])
    assert not torch.equal(of_list[2], other[2])


@pytest.mark.parametrize("queries", [1, 3])
def test_a_rotary_part_beside_latents_is_further_channels_of_the_keys(queries: int) -> None:
    """Latent attention equals attention over keys of latent and rotary part, whose values are the latents."""
    latents, rotary = torch.randn(2, 8, 16), torch.randn(2, 8, 4)
    q, q_rope = torch.randn(2, queries, 4, 16), torch.randn(2, queries, 4, 4)
    options = {
        "atten_mask": kernels.causal_mask() if queries > 1 else None,
        "actual_seq_lengths_kv": torch.tensor([7, 3]),
        "block_table": torch.tensor([[1, 0], [0, 1]], dtype=torch.int32),
        "key_rope": rotary, "num_heads": 4, "num_key_value_heads": 1, "scale": 0.3, "input_layout": "BSH",
        "sparse_mode": 3 if queries > 1 else 0, "block_size": 8,
    }  # fmt: skip
    out, _ = kernels.npu_fused_infer_attention_score(q.flatten(2), latents, latents, query_rope=q_rope.flatten(2), **options)
    for b, (page, count) in enumerate(((1, 7), (0, 3))):
        keys, values = torch.cat([latents[page, :count], rotary[page, :count]], -1), latents[page, :count]
        mask = torch.ones(queries, count, dtype=torch.bool).tril(count - queries)
        wanted = scaled_dot_product_attention(
            torch.cat([q[b], q_rope[b]], -1).transpose(0, 1), keys[None], values[None], attn_mask=mask, scale=0.3
        )
        gc.near(out[b].view(queries, 4, 16), wanted.transpose(0, 1))
    wide, options = torch.randn(2, 17, 64), options | {"sparse_mode": 0, "atten_mask": None, "query_rope": torch.randn(2, 17, 16)}
    with pytest.raises(LoweringError, match="up to 16 queries a sequence"):
        kernels.npu_fused_infer_attention_score(wide, latents, latents, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 2, 64)}, "legal over int8 pages is one query of a sequence in BSH or BSND"),
        ({"input_layout": "TND", "query": torch.zeros(2, 4, 16)}, "in layout TND; legal over int8 pages"),
        ({"key_antiquant_mode": 1}, "key_antiquant_mode is 1; legal are 0 and 5, the same for both"),
        ({"value_antiquant_scale": None}, "value_antiquant_scale is absent"),
        ({"key_antiquant_scale": torch.ones(3, 8, 2)}, r"key_antiquant_scale is \(3, 8, 2\); the other operands make \(3, 2, 8\) legal"),
        ({"key_antiquant_mode": 0, "value_antiquant_mode": 0}, r"key_antiquant_scale is \(3, 2, 8\); legal is \(1, 32\)"),
    ],
)
def test_attention_over_int8_refuses_what_the_tiling_refuses(changes: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 1, 64), "actual_seq_lengths_kv": torch.tensor([7, 3]), "num_heads": 4, "num_key_value_heads": 2,
        "block_table": torch.tensor([[1, 0], [2, 0]], dtype=torch.int32), "input_layout": "BSH", "block_size": 8, "key_antiquant_mode": 5,
        "value_antiquant_mode": 5, "key_antiquant_scale": torch.ones(3, 2, 8), "value_antiquant_scale": torch.ones(3, 2, 8),
    }  # fmt: skip
    cache = torch.zeros(3, 8, 32, dtype=torch.int8)
    kernels.npu_fused_infer_attention_score(key=cache, value=cache, **arguments)
    with pytest.raises(LoweringError, match=message):
        kernels.npu_fused_infer_attention_score(key=cache, value=cache, **{**arguments, **changes})


def segments(**changes: object) -> torch.Tensor:
    """Three segments of 5, 2 and no keys of 5, the others NaN."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(3, 5, 4, 16) for _ in range(3))
    for x in (k, v):
        x[1, 2:], x[2] = NAN, NAN
    options = {"actual_seq_lengths_kv": torch.tensor([5, 2, 0]), "num_heads": 4, "scale": 0.3, "input_layout": "BSND"} | changes
    return kernels.npu_fused_infer_attention_score(options.pop("query", q), k, v, **options)[0]


def test_without_pages_each_sequence_has_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(3, 5, 4, 16).double().transpose(1, 2) for _ in range(3))
    wanted = [scaled_dot_product_attention(q[b], k[b, :, :n], v[b, :, :n], scale=0.3).transpose(0, 1) for b, n in ((0, 5), (1, 2))]
    made = segments()
    for b, want in enumerate(wanted):
        gc.near(made[b], want)
    assert made[2].isnan().all()
    monkeypatch.setattr(kernels, "_MOST_SCORES", 20)
    gc.near(segments()[0], wanted[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_layout": "BSH"}, "block_table is absent in layout BSH and sparse_mode 0; legal without pages are BSND and 0"),
        ({"sparse_mode": 3, "atten_mask": kernels.causal_mask()}, "sparse_mode 3; legal without pages"),
        ({"actual_seq_lengths": torch.tensor([5, 2, 0])}, "nor lengths of queries"),
        ({"actual_seq_lengths_kv": torch.tensor([6, 2, 0])}, r"key lengths \[6, 2, 0\]"),
        ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is absent"),
        ({"num_heads": 2}, "num_heads 2, query"),
        ({"query": torch.zeros(3, 5, 4, 8)}, r"key is \(3, 5, 4, 16\)"),
    ],
)
def test_attention_without_pages_of_another_form_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        segments(**changes)
