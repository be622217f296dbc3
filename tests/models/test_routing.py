"""models/routing.py: the experts of each token and their weights."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.errors import ModelError
from npucompile.models.routing import SOFTMAX, Routing, route


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


def test_rules_that_no_router_has_are_refused():
    with pytest.raises(ModelError, match="routing kind is 'hash'; legal are softmax"):
        Routing("hash", 2, True)
    with pytest.raises(ModelError, match="softmax routing has 4 groups of experts; legal is 1"):
        Routing(SOFTMAX, 2, True, groups=4)
    with pytest.raises(ModelError, match="softmax routing with a bias"):
        route(Routing(SOFTMAX, 2, True), torch.zeros(1, 4), torch.zeros(4))
