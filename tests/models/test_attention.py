"""models/attention.py: one layer equals transformers' module, over pages in any order among poisoned ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.graphs.types import Bucket, Mesh, Rules
from npucompile.models import attention
from npucompile.models.batch import Batch
from npucompile.models.slices import Shard, sliced_axes, source_region
from npucompile.models.variant import Variant

CASES = ["dense", "dense-tied", "dense-equal-heads", "moe", "moe-one-expert", "next", "plain", "plain-tied", "plain-moe-raw"]


def full_layer(config):
    """Index of a layer with attention."""
    return config.layer_kinds.index("full_attention") if "full_attention" in config.layer_kinds else 1


def reference(random, layer, x):
    """transformers' module over one sequence: [n, M] -> [n, M]."""
    n = x.shape[0]
    angles = random.theirs.model.rotary_emb(x[None], torch.arange(n)[None])
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    return random.theirs.model.layers[layer].self_attn(x[None], angles, mask)[0][0]


def run(random, layer, state, bucket, rows, x):
    """Our function over a step: [B, Q, M] -> [B, Q, M] and the new state."""
    config = random.model.config
    batch = Batch.of(oracle.inputs(bucket, rows), config.rotary)
    out, state = attention.apply(config, random.weights["layers"][layer]["mixer"], state, batch, x.flatten(0, 1))
    return out.view(x.shape), state


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_prompt_then_single_tokens_equal_the_module(name):
    random, config = oracle.case(name), oracle.case(name).model.config
    layer = full_layer(config)
    x = torch.randn(2, 25, config.hidden_size, generator=torch.Generator().manual_seed(1))
    query_lens, pages = [20, 11], [[9, 2, 30, 4], [5, 12, 1, 40]]
    want = [reference(random, layer, row) for row in x]
    state = oracle.poisoned(attention.state(config, oracle.LIMITS, torch.float32))
    fed = torch.full((3, 24, config.hidden_size), float("nan"))
    for b in range(2):
        fed[b, : query_lens[b]] = x[b, : query_lens[b]]
    rows = [oracle.Row([1] * query_lens[b], 0, pages[b]) for b in range(2)]
    out, state = run(random, layer, state, Bucket("prefill", 3, 24), rows, fed)
    for b in range(2):
        torch.testing.assert_close(out[b, : query_lens[b]], want[b][: query_lens[b]], atol=1e-5, rtol=1e-5)
    for step in range(5):
        fed = torch.full((4, 1, config.hidden_size), float("nan"))
        rows = [oracle.Row([1], query_lens[b] + step, pages[b]) for b in range(2)]
        for b in range(2):
            fed[b, 0] = x[b, query_lens[b] + step]
        out, state = run(random, layer, state, Bucket("decode", 4, 1), rows, fed)
        for b in range(2):
            torch.testing.assert_close(out[b, 0], want[b][query_lens[b] + step], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_last_tokens_of_each_row_may_attend_alone(name):
    """Their outputs are those of all tokens together, and attending writes nothing."""
    random, config = oracle.case(name), oracle.case(name).model.config
    layer = full_layer(config)
    declared = attention.params(config, torch.float32, f"model.layers.{layer}.self_attn.", joined=False)
    tensors = random.theirs.state_dict()
    weights = {name: param.source.join(*(tensors[source] for source in param.source.names)) for name, param in declared.items()}
    x = torch.randn(2, 20, config.hidden_size, generator=torch.Generator().manual_seed(3))
    query_lens, pages, last = [20, 11], [[9, 2, 30], [5, 12, 1]], 2
    want = [reference(random, layer, row) for row in x]
    state = oracle.poisoned(attention.state(config, oracle.LIMITS, torch.float32))
    fed, few = (torch.full((3, width, config.hidden_size), float("nan")) for width in (24, last))
    for b, length in enumerate(query_lens):
        fed[b, :length], few[b] = x[b, :length], x[b, length - last : length]
    rows = [oracle.Row([1] * length, 0, pages[b]) for b, length in enumerate(query_lens)]
    ends = [oracle.Row([1] * last, length - last, pages[b]) for b, length in enumerate(query_lens)]
    whole, end = (
        Batch.of(oracle.inputs(bucket, own), config.rotary)
        for bucket, own in ((Bucket("prefill", 3, 24), rows), (Bucket("prefill", 3, last), ends))
    )
    state = attention.write_kv(config, weights, state, whole, fed.flatten(0, 1))
    copies = {pool: values.clone() for pool, values in state.items()}
    out = attention.attend(config, weights, state, end, few.flatten(0, 1)).view(few.shape)
    for b, length in enumerate(query_lens):
        torch.testing.assert_close(out[b], want[b][length - last : length], atol=1e-5, rtol=1e-5)
    for pool, values in copies.items():
        torch.testing.assert_close(state[pool], values, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("copies", [1, 2])
def test_rows_of_the_joined_matrix_lie_by_key_head(copies):
    """So that a shard of its rows is the same matrix of whole heads, which ranks that share a head make of that head alone."""
    config = oracle.case("moe").model.config
    config = replace(config, variant=Variant(kv_repeat=copies))
    G, D, M, per = 2 * copies, 16, 44, config.num_attention_heads // 2 // copies
    order = attention.rotated_order(D, config.rotary_dim)
    param = attention.params(config, torch.float32, "at.")["qkv"]
    tensors = [torch.randn(shape) for shape in param.source.shapes]
    joined = param.source.join(*tensors)
    first = joined.view(G, -1, M)[copies]
    head = tensors[0].view(-1, 2, D, M)[per * copies : per * copies + per]
    want = [head[:, 0][:, order].flatten(0, 1), head[:, 1].flatten(0, 1), tensors[1].view(-1, D, M)[1][order], tensors[2].view(-1, D, M)[1]]
    assert torch.equal(first, torch.cat(want))
    assert all(torch.equal(a, b) for a, b in zip(param.source.split(joined), tensors, strict=True))
    mesh, rules = Mesh((("tp", G),)), Rules.of({"kv_heads": "tp"})
    for rank in range(G):
        shard = Shard(mesh, rules, rank)
        axes = zip(tensors, param.source_axes, strict=True)
        pieces = [tensor[source_region(tensor.shape, axis, shard, sliced_axes([param], shard))[0][0]] for tensor, axis in axes]
        assert [piece.shape[0] for piece in pieces] == [2 * per * D, D, D], "a rank reads no other heads"
        assert torch.equal(param.source.join(*pieces), joined.view(G, -1, M)[rank])


@pytest.mark.parametrize(("width", "rotated"), [(16, 4), (16, 16), (10, 6)])
def test_the_order_of_channels_keeps_pairs_half_a_head_apart(width, rotated):
    order = attention.rotated_order(width, rotated)
    assert sorted(order) == list(range(width))
    assert [(order[i], order[i + width // 2]) for i in range(rotated // 2)] == [(i, i + rotated // 2) for i in range(rotated // 2)]
