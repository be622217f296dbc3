"""What travels is derived from every family's pools: bytes a token and a state are those that were worked out from the published sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from unittest import mock

import msgspec
import pytest
import torch
from support import modelslim, tiny

from npucompile.graphs import tree
from npucompile.graphs.types import Aval, Leaf, Limits, Mesh
from npucompile.lowering.artifact.manifest import Manifest
from npucompile.models import registry, sharding_rules
from npucompile.models.quant.description import formats_in
from npucompile.runtime.kv_transfer import layout
from npucompile.runtime.kv_transfer.layout import Instance, LayoutError, Region, check, instance_of, located, regions
from npucompile.runtime.kv_transfer.messages import MOST_BYTES

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


RULES = sharding_rules.rules(Mesh.parse("tp=2"))


def pools(name: str, drafts: int = 0, slots_per_request: int | None = None) -> tuple[Region, ...]:
    limits = Limits(128, 4, 9, 1024, slots_per_request or drafts + 1, drafts)
    state = replace(registry.find(name).model, drafting=drafts > 0).state(limits, torch.bfloat16)
    leaves = [Leaf(f"state.{path}", aval) for path, aval in tree.flatten(state)]
    return regions(leaves, limits, {leaf.path: 4096 * place for place, leaf in enumerate(leaves)}, RULES)


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
    (wide,) = regions([leaf], limits, {"conv": 0}, RULES)
    (narrow,) = regions([Leaf("state.conv", Aval((9, taps - 1, 10), torch.bfloat16, ("slots", None, None)))], limits, {"conv": 0}, RULES)
    assert wide.kind == narrow.kind
    assert (wide.item_bytes, wide.stride_bytes, wide.nbytes) == (60, 120, 9 * 120)


def test_a_pool_that_no_handover_knows_is_refused():
    leaf = Leaf("state.images", Aval((9, 3), torch.bfloat16, ("images", None)))
    with pytest.raises(LayoutError, match="a pool of images"):
        regions([leaf], Limits(128, 4, 9, 1024), {}, RULES)


def instance(ranks: tuple[tuple[Region, ...], ...] = (pools("qwen3.5-0.8b", 3),), **changes: object) -> Instance:
    tp = changes.get("tp", 1)
    return replace(located(replace(Instance("digest", 128, 3, 1, 1024, (), ((),)), tp=tp, addresses=((),) * tp), ranks), **changes)


def test_a_pair_meets_over_json_whatever_its_sizes_of_pools():
    other = instance(drafts=1, max_model_len=2048, ranks=(pools("qwen3.5-0.8b", 3, 1),) * 2)
    sent = Instance.from_json(msgspec.json.encode(other))
    assert Instance.from_json(other.to_json()) == other
    assert sent == other
    check(sent, instance())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model: other and digest"),
        ({"page_size": 64}, "page size: 64 and 128"),
        ({"tp": 2, "ranks": (pools("qwen3.5-0.8b", 3),) * 2}, r"tensor parallel ranks: 2 and 1, and each holds a part of .*conv"),
        ({"drafts": 0, "ranks": (pools("qwen3.5-0.8b"),)}, "draft head: False and True"),
        ({"ranks": (tuple(replace(r, dtype="int8") for r in pools("qwen3.5-0.8b", 3)),)}, r"int8\[.*\] by pages and bfloat16\["),
        ({"ranks": (pools("qwen3.5-0.8b", 3)[1:],)}, "of a rank: none and "),
    ],
)
def test_a_pair_that_differs_is_refused_by_what_differs(changes, text):
    with pytest.raises(LayoutError, match=text):
        check(instance(**changes), instance())


def test_pools_that_are_whole_on_every_rank_fit_whatever_the_ranks_of_both_sides():
    latents = pools("deepseek-v3.2", 3)
    assert not any(region.split for region in latents)
    check(instance(tp=4, ranks=(latents,) * 8), instance(tp=2, ranks=(latents,) * 2))
    assert {region.name.rpartition(".")[2] for region in pools("qwen3.5-0.8b") if region.split} == {"k", "v", "conv", "delta"}


def test_ranks_that_share_prompts_hand_over_to_groups_of_one():
    """Each holds all of the cache; of what ranks of more split nobody holds all."""
    split = pools("qwen3.5-0.8b")
    whole = tuple(replace(region, split=False) for region in split)
    check(instance(tp=4, drafts=0, ranks=(whole,) * 4), instance(drafts=0, ranks=(split,)))
    with pytest.raises(LayoutError, match="tensor parallel ranks: 4 and 2"):
        check(instance(tp=4, drafts=0, ranks=(whole,) * 4), instance(tp=2, drafts=0, ranks=(split,) * 2))


def test_ranks_are_told_by_their_addresses():
    own = pools("qwen3.5-0.8b", 3)
    ranks = tuple(tuple(replace(region, address=region.address + (rank << 40)) for region in own) for rank in range(4))
    sent = instance(tp=2, ranks=ranks)
    text = msgspec.json.encode(sent)
    assert Instance.from_json(text) == sent
    assert text.count(own[0].name.encode()) == 1
    assert [tuple(sent.rank(number)) for number in range(4)] == list(ranks)
    assert list(sent.group(1)) == [2, 3]
    for number in (-1, 2):
        with pytest.raises(LayoutError, match="legal are 0 to 1"):
            sent.group(number)


@pytest.mark.parametrize(
    ("tp", "ranks", "text"),
    [
        (2, ((0,),), "1 ranks in groups of 2"),
        (0, ((0,),), "1 ranks in groups of 0"),
        (1, (), "0 ranks"),
        (2, ((0,), ()), "rank 1 has other pools than rank 0"),
    ],
)
def test_ranks_that_make_no_groups_are_refused(tp, ranks, text):
    pool = pools("qwen3.5-0.8b")[:1]
    with pytest.raises(LayoutError, match=text):
        Instance("digest", 128, 3, tp, 1024, pool, ranks)
    data = {**instance().to_json(), "tp": tp, "addresses": ranks, "pools": [asdict(pool[0])]}
    with pytest.raises(LayoutError, match=text):
        Instance.from_json(json.dumps(data).encode())


def test_ranks_of_other_pools_are_refused():
    with pytest.raises(LayoutError, match="rank 1 has other pools than rank 0"):
        instance(ranks=(pools("qwen3.5-0.8b"), pools("qwen3.5-0.8b", 3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("pools"),
        lambda data: data.update(addresses=[["x"]]),
        lambda data: data.update(pools=[None]),
        lambda data: data.update(tp="1"),
    ],
)
def test_a_description_of_another_form_is_refused(change):
    data = instance().to_json()
    change(data)
    with pytest.raises(LayoutError, match="another way"):
        Instance.from_json(json.dumps(data).encode())


def test_a_greeting_of_many_ranks_makes_no_object_for_each_pool_of_each_rank():
    """A million ranks and more fit into one, and took 48 s."""
    own = instance()
    data = own.to_json()
    data["pools"], data["addresses"] = data["pools"][:1], [[0]] * (MOST_BYTES // 4)
    with mock.patch.object(layout, "replace", side_effect=AssertionError):
        sent = Instance.from_json(json.dumps(data).encode())
        with pytest.raises(LayoutError, match="differ: pool"):
            check(sent, own)
    assert sent.rank(MOST_BYTES // 4 - 1) == [sent.pools[0].at(0)]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> dict[str, Manifest]:
    model = tiny.write_checkpoint(tmp_path_factory.mktemp("models") / "one", **tiny.NPU_SIZES)
    moved, other = model.parent / "moved", tiny.write_checkpoint(model.parent / "other", seed=1, **tiny.NPU_SIZES)
    shutil.copytree(model, moved)
    plans = {
        "one": tiny.planned_device(model, weights="bound"),
        "moved": tiny.planned_device(moved, weights="bound", buckets=(8,), prefill=(64,), max_num_seqs=8, max_model_len=128),
        "groups": tiny.planned_device(model, weights="bound", mesh="dp=4,tp=2"),
        "other": tiny.planned_device(other, weights="bound"),
        "integers": tiny.planned_device(model, weights="bound", quantization="w8a8"),
        "cache": tiny.planned_device(model, weights="bound", kv_cache_dtype="int8"),
        "drafts": tiny.planned_device(model, weights="bound", num_speculative_tokens=3),
        "none": tiny.planned_device(model, weights="bound", num_speculative_tokens=0),
    }
    found = {name: tiny.described(plan) for name, plan in plans.items()}
    return found | {"without": replace(found["one"], source_digest="none", checkpoint=None)}


@pytest.mark.parametrize("name", ["one", "moved", "groups", "drafts"])
def test_builds_of_one_checkpoint_are_a_pair_wherever_it_is_and_whatever_their_sizes(manifests, name):
    one, other = instance_of(manifests["one"]), instance_of(manifests[name])
    check(one, other)
    check(other, one)
    assert len(other.addresses) == {"groups": 8}.get(name, 4)
    assert {address for rank in other.addresses for address in rank} == {0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other", r"model: qwen3_5 in bf16, weights float, digest \w+ and qwen3_5 in bf16, weights float, digest"),
        ("without", "model: "),
        ("integers", "weights float, w8a8, digest"),
        ("cache", r"pool layers\.\d\.k of a rank: bfloat16\[.*\] by pages and int8"),
        ("none", "draft head: True and False"),
    ],
)
def test_builds_that_compute_other_values_are_no_pair(manifests, name, text):
    with pytest.raises(LayoutError, match=text):
        check(instance_of(manifests["one"]), instance_of(manifests[name]))


def test_the_checkpoint_that_is_served_stands_for_one_that_the_build_had_not(manifests):
    check(instance_of(manifests["one"]), instance_of(manifests["without"], source=manifests["one"].source_digest))


def test_scales_of_each_phase_of_one_quantised_checkpoint_are_a_pair():
    directory = modelslim.FIXTURES / "dense_w8a8_mix_m4"
    prefill = tiny.described(tiny.planned_device(directory, mesh="dp=2,tp=1", num_speculative_tokens=0, weights="bound"))
    decode = replace(prefill, formats=formats_in(directory, decodes_only=True).as_fields())
    assert decode.formats != prefill.formats
    check(instance_of(prefill), instance_of(decode))
    with pytest.raises(LayoutError, match=r"weights .*w8a8, digest"):
        check(instance_of(prefill), instance_of(replace(decode, source_digest="another")))
