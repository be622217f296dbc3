"""What travels is derived from every family's pools: bytes a token and a state are those that were worked out from the published sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from npucompile.graphs import tree
from npucompile.graphs.types import Aval, Leaf, Limits
from npucompile.models import registry
from npucompile.runtime.kv_transfer.layout import Instance, LayoutError, Region, check, regions

# Bytes of a token without and with the draft layer, layers x channels x 2 from each config.json; and of a state, recurrent ones in float32.
BYTES = {
    "deepseek-r1": (70_272, 71_424, 0),
    "deepseek-v3.2": (85_888, 87_296, 0),
    "qwen3-235b-a22b": (192_512, None, 0),
    "qwen3-coder-480b-a35b": (253_952, None, 0),
    "qwen3.5-397b": (30_720, 32_768, 3_317_760 + 188_743_680),
    "qwen3.6-27b": (65_536, 69_632, 2_949_120 + 150_994_944),
    "qwen3-next-80b-a3b": (24_576, 26_624, 1_769_472 + 75_497_472),
}


def pools(name: str, drafts: int = 0, slots_per_request: int | None = None) -> tuple[Region, ...]:
    limits = Limits(128, 4, 9, 1024, slots_per_request or drafts + 1, drafts)
    state = replace(registry.find(name).model, drafting=drafts > 0).state(limits, torch.bfloat16)
    leaves = [Leaf(f"state.{path}", aval) for path, aval in tree.flatten(state)]
    return regions(leaves, limits, {leaf.path: 4096 * place for place, leaf in enumerate(leaves)})


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_published_models(name):
    plain, drafting, state = BYTES[name]
    for drafts, expected in ((0, plain), (3, drafting)):
        if expected is not None:
            found = pools(name, drafts)
            assert sum(region.item_bytes for region in found if region.axis == "pages") == expected * 128
            assert sum(region.item_bytes for region in found if region.axis == "slots") == state
            assert {region.axis for region in found} <= {"pages", "slots"}


def test_of_a_window_with_the_inputs_of_a_step_the_first_one_travels():
    limits, taps = Limits(128, 4, 9, 1024, 4, 3), 4
    leaf = Leaf("state.conv", Aval((9, taps - 1 + 3, 10), torch.bfloat16, ("first_slots", None, None)))
    (wide,) = regions([leaf], limits, {"conv": 0})
    (narrow,) = regions([Leaf("state.conv", Aval((9, taps - 1, 10), torch.bfloat16, ("slots", None, None)))], limits, {"conv": 0})
    assert wide.kind == narrow.kind
    assert (wide.item_bytes, wide.stride_bytes, wide.nbytes) == (60, 120, 9 * 120)


def test_a_pool_that_no_handover_knows_is_refused():
    leaf = Leaf("state.images", Aval((9, 3), torch.bfloat16, ("images", None)))
    with pytest.raises(LayoutError, match="a pool of images"):
        regions([leaf], Limits(128, 4, 9, 1024), {})


def instance(**changes: object) -> Instance:
    return replace(Instance("digest", 128, 3, 1, 1024, (pools("qwen3.5-0.8b", 3),)), **changes)


def test_a_pair_meets_over_json_whatever_its_sizes_of_pools():
    other = instance(drafts=1, max_model_len=2048, ranks=(pools("qwen3.5-0.8b", 3, 1),) * 2)
    sent = Instance.from_json(json.loads(json.dumps(other.to_json())))
    assert sent == other
    check(sent, instance())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model: other and digest"),
        ({"page_size": 64}, "page size: 64 and 128"),
        ({"tp": 2}, "tensor parallel ranks: 2 and 1"),
        ({"drafts": 0, "ranks": (pools("qwen3.5-0.8b"),)}, "draft head: False and True"),
        ({"ranks": (tuple(replace(r, dtype="int8") for r in pools("qwen3.5-0.8b", 3)),)}, r"int8\[.*\] by pages and bfloat16\["),
        ({"ranks": (pools("qwen3.5-0.8b", 3)[1:],)}, "of rank 0: none and "),
    ],
)
def test_a_pair_that_differs_is_refused_by_what_differs(changes, text):
    with pytest.raises(LayoutError, match=text):
        check(instance(**changes), instance())


def test_a_description_of_another_form_is_refused():
    with pytest.raises(LayoutError, match="another way"):
        Instance.from_json({"model": "digest"})
