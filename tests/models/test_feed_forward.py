"""models/feed_forward.py: dense and mixture-of-experts blocks equal transformers' modules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.graphs.spmd.partition import collective_group, partition
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules
from npucompile.models import feed_forward
from npucompile.models.params import avals
from npucompile.models.quant.declare import stored
from npucompile.models.variant import Variant

MOE = ["moe", "moe-tied", "moe-one-expert", "next-raw", "plain-moe-raw"]


@pytest.mark.parametrize("name", ["dense", "dense-tied", *MOE, "plain", "plain-moe"])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@torch.no_grad()
def test_blocks_equal_the_modules(name, tokens):
    random, config = oracle.case(name), oracle.case(name).model.config
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(tokens))
    module, weights = random.theirs.model.layers[1].mlp, random.weights["layers"][1]["mlp"]
    theirs = module(x[None])
    if config.num_experts:
        ours, routers = feed_forward.moe(config, weights, x)
        assert tuple(routers.shape) == (tokens, config.num_experts)
        torch.testing.assert_close(routers, x @ module.gate.weight.t(), atol=1e-5, rtol=1e-5)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    else:
        ours = feed_forward.dense(weights, x, tokens)
    torch.testing.assert_close(ours, theirs.view(ours.shape), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("tokens", [1, 33])
@torch.no_grad()
def test_grouped_experts_are_the_plain_ones(name, tokens):
    random, config = oracle.case(name), oracle.case(name).model.config
    grouped = replace(config, variant=Variant(grouped=True))
    source = feed_forward.moe_params(config, torch.float32, "at.")
    plain = random.weights["layers"][1]["mlp"]
    tensors = oracle.split(source, {key: plain[key] for key in source})
    weights = oracle.join(stored(feed_forward.moe_params(grouped, torch.float32, "at."), grouped.variant), tensors)
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(tokens))
    (want, logits), (actual, same) = feed_forward.moe(config, plain, x), feed_forward.moe(grouped, weights, x)
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(same, logits)


@pytest.mark.parametrize("dispatched", [0, 4, 8])
def test_few_tokens_are_dispatched_and_many_gathered(dispatched):
    """Just as many as `most_dispatched` may still be sent to their experts."""
    variant = Variant(grouped=True, most_dispatched=dispatched)
    config = replace(oracle.case("moe-tied").model.config, variant=variant)

    def block(params, state, inputs):
        return {"y": feed_forward.moe(config, params, inputs["x"])[0]}, state

    params = avals(stored(feed_forward.moe_params(config, torch.float32, "at."), config.variant))
    for tokens in (4, 5):
        x = {"x": Aval((tokens, config.hidden_size), torch.float32)}
        program = Program("mlp", Bucket("prefill", 1, tokens), block, params, {}, x)
        partitioned = partition(program, Mesh.parse("dp=2"), Rules.of({"experts": ("dp", "tp")}))
        kinds = [kind for kind, *_ in partitioned.collectives]
        dispatched_kinds = ["moe_dispatch", "moe_combine"]
        assert kinds == (dispatched_kinds if tokens <= dispatched else ["all_gather_into_tensor", "reduce_scatter_tensor"])


@pytest.mark.parametrize(("in_flight", "order"), [(1, "DCDCDC"), (2, "DDCDCC"), (3, "DDDCCC"), (9, "DDDCCC")])
@pytest.mark.parametrize("name", ["moe-tied", "plain-moe-raw"])
def test_many_tokens_may_be_dispatched_in_parts(name, in_flight, order):
    variant = Variant(grouped=True, most_dispatched=2, dispatches_in_parts=True, in_flight=in_flight)
    config = replace(oracle.case(name).model.config, variant=variant)
    params = avals(stored(feed_forward.moe_params(config, torch.float32, "at."), config.variant))
    x = {"x": Aval((5, config.hidden_size), torch.float32)}
    program = Program("mlp", Bucket("prefill", 1, 5), lambda p, s, i: ({"y": feed_forward.moe(config, p, i["x"])[0]}, s), params, {}, x)
    partitioned = partition(program, Mesh.parse("dp=2"), Rules.of({"experts": ("dp", "tp")}))
    assert "".join(kind.removeprefix("moe_")[0].upper() for kind, *_ in partitioned.collectives) == order
    exchanges = [node for node in partitioned.graph.graph.nodes if collective_group(node) is not None]
    for earlier, later in itertools.pairwise(exchanges):
        assert earlier in _ancestors(later), "a graph for GE has no other order"


def _ancestors(node):
    known, queue = set(), [node]
    while queue:
        new = set(queue.pop().all_input_nodes) - known
        known |= new
        queue += new
    return known
