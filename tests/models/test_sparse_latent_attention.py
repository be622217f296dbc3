"""models/sparse_latent_attention.py: scores of the indexer and the keys it chooses are those of transformers."""

from __future__ import annotations

import pytest
import torch
from support import oracle

from npucompile.graphs import ops
from npucompile.graphs.types import Bucket
from npucompile.models import sparse_latent_attention
from npucompile.models.batch import Batch

TOKENS = 30


def theirs(random, x, monkeypatch):
    """Scores [T, T] and chosen keys [T, top_k] of transformers' indexer of the first layer."""
    attention = random.theirs.model.layers[0].self_attn
    compressed = attention.q_a_layernorm(attention.q_a_proj(x))
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None]
    angles, scores = random.theirs.model.rotary_emb(x, torch.arange(TOKENS)[None]), []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, *args, **options: scores.append(self[0]) or topk(self, *args, **options))
    chosen = attention.indexer(x, compressed, angles, mask, None)[0]
    monkeypatch.undo()
    return scores[0], chosen


@pytest.mark.parametrize("name", ["sparse", "sparse-yarn", "pairs"])
@torch.no_grad()
def test_scores_and_chosen_keys_are_those_of_transformers(name, monkeypatch):
    """Beyond `index_topk` keys the chosen ones are equal, unless a tie decides."""
    random = oracle.case(name)
    config, weights = random.model.config, random.weights["layers"][0]["mixer"]
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    scores, chosen = theirs(random, x[None], monkeypatch)
    batch = Batch.of(oracle.inputs(Bucket("prefill", 1, TOKENS), [oracle.Row([1] * TOKENS, 0, [3, 1, 2, 5])]), config.rotary)
    rows, entries = sparse_latent_attention.compress(config, weights, x, batch)
    pools = oracle.poisoned(sparse_latent_attention.state(config, oracle.LIMITS, torch.float32))
    pools = sparse_latent_attention.write(config, weights, pools, batch, entries)
    q, head_weights = sparse_latent_attention.index_operands(config, weights, batch, rows)
    place = (batch.page_table, batch.num_computed_tokens, batch.query_lens)
    ours = ops.sparse_index(q, head_weights, pools["index"], *place, config.index_topk)[0]
    keys = pools["index"][[3, 1, 2, 5]].view(-1, config.index_head_dim)[:TOKENS]
    products = torch.einsum("qid,kd->qik", q[0], keys).relu()
    constant = (config.index_head_dim * config.index_n_heads) ** -0.5
    visible = torch.ones(TOKENS, TOKENS).tril() > 0
    torch.testing.assert_close(
        (torch.einsum("qi,qik->qk", head_weights[0], products) * constant)[visible], scores[visible], rtol=1e-4, atol=1e-5
    )
    decided = 0
    for t in range(TOKENS):
        ranked = scores[t, : t + 1].sort(descending=True).values
        beyond = t + 1 > config.index_topk
        assert set(ours[t].tolist()) - {-1} <= set(range(t + 1))
        if beyond and ranked[config.index_topk - 1] - ranked[config.index_topk] > 1e-5:
            decided += 1
            assert set(ours[t].tolist()) == set(chosen[t].tolist())
        elif not beyond:
            assert sorted(ours[t].tolist()) == [-1] * (config.index_topk - t - 1) + list(range(t + 1))
    assert decided > TOKENS // 2


def test_the_indexer_is_whole_on_every_device_and_its_keys_have_a_pool():
    config = oracle.case("sparse").model.config
    state = sparse_latent_attention.state(config, oracle.LIMITS, torch.bfloat16)
    assert (state["index"].shape, sorted(state)) == ((41, 8, 1, 10), ["index", "latent", "rotary"])
    params = sparse_latent_attention.params(config, torch.float32, "a.")
    assert not {axis for name in params if name.startswith("index") for axis in params[name].aval.axes if axis}
