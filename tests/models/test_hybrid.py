"""models/hybrid.py: the draft head equals MtpLayer, and pools and parameters are what layers of two kinds have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import fleets, oracle

from npucompile.graphs import tree
from npucompile.graphs.types import Bucket
from npucompile.models import hybrid
from npucompile.models.presets import BUNDLED
from npucompile.models.quant.declare import stored
from npucompile.models.variant import Variant

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe", "moe-tied", "next", "next-raw", *BUNDLED])
@torch.no_grad()
def test_draft_head_equals_mtp_layer_and_recurses(name):
    oracle.DraftRun(name).check_recursion(TOLERANCE)


@pytest.mark.parametrize("name", ["dense", "moe", "next", *BUNDLED])
def test_sources_of_the_draft_head_name_every_tensor_of_mtp_layer(name):
    oracle.DraftRun(name).check_sources()


@torch.no_grad()
def test_draft_head_leaves_the_layers_pools_alone():
    head = oracle.DraftRun("dense")
    layers = head.state["layers"]
    head.run(Bucket("decode", 1, 1), [oracle.Row([5], 0, [1])], torch.zeros(1, head.config.hidden_size))
    assert head.state["layers"] is layers


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_recipes_leave_the_draft_head_float(scheme):
    plain = dataclasses.replace(oracle.case("moe").model.config, mtp_num_hidden_layers=1)
    quantised, unquantised = fleets.quantised(scheme), Variant(grouped=True)
    assert avals_of(plain, quantised) == avals_of(plain, unquantised)


def avals_of(config, variant):
    head = stored(hybrid.abstract_params(config, torch.bfloat16)["mtp"], variant)
    return [(path, param.aval) for path, param in tree.flatten(head)]


def test_state_is_one_pool_a_layer():
    config = dataclasses.replace(oracle.case("dense").model.config, mtp_num_hidden_layers=1)
    state = hybrid.abstract_state(config, oracle.LIMITS, torch.bfloat16)
    assert [sorted(pools) for pools in state["layers"]] == [["conv", "delta"]] * 3 + [["k", "v"]]
    assert sorted(state["mtp"]) == ["k", "v"]
    shapes = {path: (aval.shape, aval.dtype) for path, aval in tree.flatten(state)}
    assert shapes["layers.0.conv"] == ((13, 3, 2 * 2 * 8 + 4 * 12), torch.bfloat16)
    assert shapes["layers.0.delta"] == ((13, 4, 12, 8), torch.float32)
    assert shapes["layers.3.k"] == shapes["mtp.v"] == ((41, 8, 1, 18), torch.bfloat16)
