"""What is computed of floats and names a place (a token, an expert, a key) is in range whatever the floats are, in every lowering."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.ops.accept import accept
from npucompile.graphs.ops.moe_route import moe_route
from npucompile.graphs.ops.moe_route_grouped import moe_route_grouped
from npucompile.graphs.ops.sample import sample
from npucompile.graphs.ops.sparse_index import sparse_index
from npucompile.graphs.ops.token_logprobs import token_logprobs
from npucompile.lowering.ascend.operators.table import KERNELS
from npucompile.models import sampling

pytestmark = pytest.mark.usefixtures("kernels")

FLOATS = (0.0, -0.0, 1.0, -3.5, math.nan, math.inf, -math.inf, 1e-40, 1e-45, 3e38, -3e38)
ANY_FLOATS = st.lists(st.sampled_from(FLOATS), min_size=32, max_size=32).map(torch.tensor)
KNOB = st.sampled_from([0.0, 1.0, 0.5, 1e-40])
BACKENDS = ("eager", "inductor", "npu")
RUNS = settings(max_examples=25)


def in_range(ids: torch.Tensor, low: int, high: int) -> bool:
    return bool(((ids >= low) & (ids < high)).all())


@RUNS
@given(ANY_FLOATS, KNOB, st.sampled_from([0, 1, 40]), KNOB, KNOB, st.sampled_from([0.0, 0.5, 1 - 2**-24]))
def test_sampled_tokens(logits, temperature, top_k, top_p, min_p, uniform):
    knobs = [torch.tensor([value]) for value in (temperature, top_k, top_p, min_p)]
    knobs[1] = knobs[1].int()
    for backend in BACKENDS:
        tokens = sample.lower_for(backend)(logits.view(1, 1, -1), *knobs, torch.full((1, 1), uniform))
        assert in_range(tokens, -2, 32), backend
        counts = accept.lower_for(backend)(tokens, tokens, torch.ones(1, dtype=torch.int32))
        assert in_range(counts, 0, 2), backend


@RUNS
@given(ANY_FLOATS)
def test_most_likely_tokens(logits):
    assert in_range(sampling.best(logits.view(2, 16)), 0, 16)
    tokens, asked = torch.tensor([[3], [0]], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for backend in BACKENDS:
        _, ids, _ = token_logprobs.lower_for(backend)(logits.view(2, 1, 16), tokens, asked, 4)
        assert in_range(ids, 0, 16), backend


@RUNS
@given(ANY_FLOATS)
def test_experts(logits):
    """Of gates on NPUs the kernel's meaning on the CPU: what a device makes of NaN is its documentation's to say."""
    logits = logits.view(4, 8)
    for backend in BACKENDS[:2]:
        assert in_range(moe_route.lower_for(backend)(logits, 2, True)[1], 0, 8), backend
        assert in_range(moe_route_grouped.lower_for(backend)(logits, torch.zeros(8), 2, 4, 2, True, 1.0)[1], 0, 8), backend
    gate = KERNELS["npu.npu_moe_gating_top_k_softmax_v2.default"]
    assert in_range(gate(logits, k=2, renorm=1)[1], 0, 8)
    gate = KERNELS["npu.npu_moe_gating_top_k.default"]
    grouped = {"bias": torch.zeros(8), "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
    assert in_range(gate(logits, 2, **grouped)[1], 0, 8)


@RUNS
@given(ANY_FLOATS)
def test_keys(floats):
    q, cache = floats[:4].view(1, 1, 2, 2), floats[4:20].view(4, 2, 1, 2)
    table, start, lens = torch.tensor([[1, 3]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for backend in BACKENDS[:2]:
        keys = sparse_index.lower_for(backend)(q, floats[20:22].view(1, 1, 2), cache, table, start, lens, 3)
        assert in_range(keys, -1, 4), backend
