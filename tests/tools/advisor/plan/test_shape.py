"""tools/advisor/plan/shape.py: the sizes of a model give its parameters, which the model's own declaration counts."""

from __future__ import annotations

import math

import pytest
import torch

from npucompile.graphs import tree
from npucompile.models.registry import find
from npucompile.tools.advisor.plan.prefill import expert_layer_bytes
from npucompile.tools.advisor.plan.products import attention_weights
from npucompile.tools.advisor.plan.shape import shape_of
from npucompile.tools.advisor.plan.system import PlannedLayout, PlannedMachine, Scheme, System

MODELS = ("deepseek-r1", "deepseek-v3.2", "qwen3-32b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-397b", "qwen3-0.6b")


@pytest.mark.parametrize("name", MODELS)
def test_it_counts_the_parameters_of_the_model(name: str) -> None:
    source = find(name)
    own = [
        math.prod(param.aval.shape)
        for leaf, param in tree.flatten(source.model.params(torch.bfloat16))
        if not leaf.startswith(source.model.family.draft_key or "-")
    ]
    shape = shape_of(source)
    full, linear = attention_weights(shape, 1)
    count = shape.full_layers * full + shape.linear_layers * linear + shape.dense_layers * 3 * shape.hidden * shape.dense_width
    if shape.latent:
        count += shape.full_layers * shape.heads * shape.latent.kv_rank * (shape.latent.nope + shape.latent.value)
    one = System(shape, Scheme("bytes", 1.0, 1.0, 1.0), PlannedLayout(1, 1), PlannedMachine("any"))
    router = shape.hidden * shape.experts
    count += shape.expert_layers * (expert_layer_bytes(one, 1.0, 1.0) - router)
    tied = source.model.config.tie_word_embeddings
    count += shape.hidden * shape.vocab * (1 if tied else 2)
    assert count == pytest.approx(sum(own), rel=0.003)


def test_heads_that_draft_are_found():
    assert {name: (draft.kind if (draft := shape_of(name).draft) else None) for name in ("deepseek-r1", "qwen3-32b", "qwen3-14b")} == {
        "deepseek-r1": "mtp",
        "qwen3-32b": "eagle3",
        "qwen3-14b": None,
    }
