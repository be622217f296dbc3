"""models/gated_deltanet.py: one layer equals transformers' module, chunked, recurrent, and with several states a step."""

from __future__ import annotations

import pytest
import torch
from support import oracle

from npucompile.graphs.types import Bucket
from npucompile.models import gated_deltanet
from npucompile.models.batch import Batch

CASES = oracle.HYBRID


def run(random, layer, state, bucket, rows, x):
    """Our function over a step: [B, Q, M] -> [B, Q, M] and the new state."""
    config = random.model.config
    batch = Batch.of(oracle.inputs(bucket, rows), config.rotary)
    out, state = gated_deltanet.apply(config, random.weights["layers"][layer]["mixer"], state, batch, x.flatten(0, 1))
    return out.view(x.shape), state


def padded(x, parts, batch, q_len):
    """[batch, q_len, M] with x[b, begin:end] for each (begin, end) of parts, NaN elsewhere."""
    fed = torch.full((batch, q_len, x.shape[-1]), float("nan"))
    for b, (begin, end) in enumerate(parts):
        fed[b, : end - begin] = x[b, begin:end]
    return fed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("q_len", [1, 24, 32, 31], ids=lambda q: f"q{q}")
@torch.no_grad()
def test_chunks_then_single_tokens_equal_the_module(name, q_len):
    """q_len 1 goes token by token, 31 in chunks of one, 24 of eight, 32 of thirty-two; 41 tokens and 35 of another row."""
    random, config = oracle.case(name), oracle.case(name).model.config
    layer = config.layer_types.index("linear_attention")
    x = torch.randn(2, 44, config.hidden_size, generator=torch.Generator().manual_seed(1))
    want = random.theirs.model.layers[layer].linear_attn(x)
    state = oracle.poisoned(gated_deltanet.state(config, oracle.LIMITS, torch.float32))
    query_lens, slots = [41, 35], [3, 7]
    for begin in range(0, 41, q_len):
        parts = [(min(begin, n), min(begin + q_len, n)) for n in query_lens]
        live = [b for b in range(2) if parts[b][1] > parts[b][0]]
        rows = [oracle.Row([1] * (parts[b][1] - parts[b][0]), parts[b][0], [], slots[b], [slots[b]]) for b in live]
        fed = padded(x[live], [parts[b] for b in live], 3, q_len)
        out, state = run(random, layer, state, Bucket("prefill", 3, q_len), rows, fed)
        for i, b in enumerate(live):
            torch.testing.assert_close(out[i, : parts[b][1] - parts[b][0]], want[b, slice(*parts[b])], atol=2e-5, rtol=1e-5)
    for step in range(3):
        at = [n + step for n in query_lens]
        rows = [oracle.Row([1], at[b], [], slots[b] + step, [slots[b] + step + 1]) for b in range(2)]
        out, state = run(random, layer, state, Bucket("decode", 4, 1), rows, padded(x, [(n, n + 1) for n in at], 4, 1))
        for b in range(2):
            torch.testing.assert_close(out[b, 0], want[b, at[b]], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("next")])
def test_rows_lie_by_key_head_and_split_undoes_join(name):
    """A shard of `qkvzba` or `conv` rows is a smaller layer; split undoes join for random tensors."""
    config = oracle.case(name).model.config
    params = gated_deltanet.params(config, torch.float32, "at.")
    for what in ("qkvzba", "conv"):
        source = params[what].source
        parts = [torch.randn(shape) for shape in source.shapes]
        joined = source.join(*parts)
        assert tuple(joined.shape) == params[what].aval.shape
        assert all(torch.equal(a, b) for a, b in zip(source.split(joined), parts, strict=True))
    Dk, _, values, gates, heads, _ = gated_deltanet.rows_per_key_head(config)
    keys = config.linear_num_key_heads * Dk
    qkv, z, b, a = (torch.randn(shape) for shape in params["qkvzba"].source.shapes)
    first = params["qkvzba"].source.join(qkv, z, b, a)[: 2 * Dk + values + gates + 2 * heads]
    parts = [qkv[:Dk], qkv[keys : keys + Dk], qkv[2 * keys : 2 * keys + values], z[:gates], b[:heads], a[:heads]]
    assert torch.equal(first, torch.cat(parts))
