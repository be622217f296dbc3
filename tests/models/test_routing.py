"""models/routing.py: the experts of each token and their weights."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.errors import ModelError
from npucompile.models.routing import SIGMOID, SOFTMAX, Routing, route


@pytest.mark.parametrize(("renormalise", "scale"), [(True, 1.0), (False, 1.0), (True, 2.5)])
def test_softmax_routing_is_the_router_of_transformers(renormalise, scale):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=9, num_experts_per_tok=4, norm_topk_prob=renormalise, hidden_size=6))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(9, 6, generator=generator))
        logits, want, chosen = router(torch.randn(7, 6, generator=generator))
        weights, ids = route(Routing(SOFTMAX, 4, renormalise, scale), logits)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, want * scale)
    assert ids.dtype == torch.int32


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (6, 6)])
@pytest.mark.parametrize(("renormalise", "scale"), [(True, 2.5), (False, 1.0), (True, 1.0)])
def test_sigmoid_routing_is_the_router_of_transformers(groups, top_groups, renormalise, scale):
    """Its weights come in no order, so they are compared by expert."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    sizes = {"n_routed_experts": 12, "num_experts_per_tok": 4, "hidden_size": 6, "n_group": groups, "topk_group": top_groups}
    router = DeepseekV3TopkRouter(DeepseekV3Config(norm_topk_prob=renormalise, routed_scaling_factor=scale, **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(12, 6, generator=generator))
        router.e_score_correction_bias.copy_(torch.randn(12, generator=generator) * 0.3)
        logits, want, chosen = router(torch.randn(50, 6, generator=generator))
        rule = Routing(SIGMOID, 4, renormalise, scale, groups, top_groups)
        weights, ids = route(rule, logits, router.e_score_correction_bias)
    dense = [torch.zeros(50, 12).scatter(1, i.long(), w) for i, w in ((ids, weights), (chosen, want))]
    assert torch.equal(ids.sort(-1).values.long(), chosen.sort(-1).values)
    torch.testing.assert_close(*dense)
    biased = (logits.sigmoid() + router.e_score_correction_bias).topk(4, -1).indices.sort(-1).values
    assert (groups == top_groups) == torch.equal(biased, chosen.sort(-1).values), "groups decide somewhere"


def test_rules_that_no_router_has_are_refused():
    with pytest.raises(ModelError, match="routing kind is 'hash'; legal are softmax, sigmoid"):
        Routing("hash", 2, True)
    with pytest.raises(ModelError, match="softmax routing has 4 groups of experts; legal is 1"):
        Routing(SOFTMAX, 2, True, groups=4)
    with pytest.raises(ModelError, match="softmax routing with a bias"):
        route(Routing(SOFTMAX, 2, True), torch.zeros(1, 4), torch.zeros(4))
    with pytest.raises(ModelError, match="sigmoid routing without a bias"):
        route(Routing(SIGMOID, 2, True), torch.zeros(1, 4))
    with pytest.raises(ModelError, match="4 experts in 4 groups, of which a token chooses 2 and 2 experts; legal are groups of equal size"):
        route(Routing(SIGMOID, 2, True, groups=4, top_groups=2), torch.zeros(1, 4), torch.zeros(4))
