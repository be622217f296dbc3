"""models/hybrid.py: the draft head equals MtpLayer, and pools and parameters are what layers of two kinds have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import fleets, oracle

from npucompile.graphs import tree
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


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_recipes_leave_the_draft_head_float(scheme):
    plain = dataclasses.replace(oracle.case("moe").model.config, mtp_num_hidden_layers=1)
    quantised, unquantised = fleets.quantised(scheme), Variant(grouped=True)
    assert avals_of(plain, quantised) == avals_of(plain, unquantised)


def avals_of(config, variant):
    head = stored(hybrid.abstract_params(config, torch.bfloat16)["mtp"], variant)
    return [(path, param.aval) for path, param in tree.flatten(head)]
