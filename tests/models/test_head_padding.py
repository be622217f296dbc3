"""models/head_padding.py: heads that tp does not divide get places, each beside its keys, and models of them say what transformers says."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fleets, oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import PartitionError, SpecError
from npucompile.graphs.types import Mesh
from npucompile.lowering.platform import Platform
from npucompile.models import registry, sharding_rules, slices
from npucompile.models.deployed import deployed
from npucompile.models.head_padding import copies, grouped, heads_of, widened
from npucompile.models.quant.formats import PLAIN, Formats
from npucompile.models.step import Model
from npucompile.models.variant import PLAIN as PLAIN_VARIANT
from npucompile.models.variant import Variant

F32 = torch.float32


@given(keys=st.integers(1, 16), per=st.integers(1, 12), ranks=st.integers(1, 24))
def test_each_query_head_has_one_place_beside_its_keys_and_ranks_have_equally_many(keys, per, ranks):
    times = copies(keys, ranks)
    wide = -(-keys // (ranks // times)) * (ranks // times) * -(-per // times) * times
    if wide >= 2 * keys * per:
        with pytest.raises(PartitionError, match=f"{wide - keys * per} of {wide} would be padding; legal are numbers of ranks"):
            grouped(keys * per, keys, ranks)
        return
    padded = {heads.kind: heads for heads in grouped(keys * per, keys, ranks)}
    queries = padded["q_heads"].places if "q_heads" in padded else tuple(range(keys * per))
    groups = padded["kv_heads"].places if "kv_heads" in padded else tuple(range(keys))
    assert [head for head in queries if head >= 0] == list(range(keys * per))
    assert [group for group in groups if group >= 0] == list(range(keys))
    slots = len(groups) * times
    assert slots % ranks == 0 == len(queries) % slots
    assert len(queries) == wide
    each = len(queries) // slots
    for place, head in enumerate(queries):
        group = groups[place // each // times]
        assert head < 0 or head // per == group
    # A rank's heads come before its padding, which is how it knows what it read.
    share = len(queries) // ranks
    for rank in range(ranks):
        own = [head >= 0 for head in queries[rank * share : (rank + 1) * share]]
        assert own == sorted(own, reverse=True)


small = st.integers(1, 6)
dividing = st.one_of(
    st.builds(lambda ranks, times, per: (ranks * times, per, ranks), small, small, small),
    st.builds(lambda keys, times, per: (keys, per * times, keys * times), small, small, small),
)


@given(dividing)
def test_what_divides_is_not_padded(sizes):
    keys, per, ranks = sizes
    assert grouped(keys * per, keys, ranks) == ()
    assert copies(keys, ranks) == max(1, ranks // keys)


KEYS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
DELTA = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "plain": oracle.plain(1, **{**KEYS, "num_attention_heads": 10, "num_key_value_heads": 5}),
    "plain, three groups": oracle.plain(2, **KEYS),
    "plain, two groups": oracle.plain(1, **{**KEYS, "num_key_value_heads": 2}),
    "gated": oracle.settings("lf", **KEYS, **DELTA),
    "fused": oracle.settings("lf", **{**oracle.NEXT, "num_experts": 8}, **KEYS, **{**DELTA, "linear_num_value_heads": 9}),
    "latent": oracle.latent(1, **{**KEYS, "num_key_value_heads": 6}),
    "lite": oracle.latent(2, **{**oracle.LITE, "n_routed_experts": 8}),
    "sparse": oracle.latent(2, **oracle.SPARSE, **{**KEYS, "num_key_value_heads": 6}),
}


def padded(name: str) -> str:
    return f"padded {name}"


@functools.cache
def random(name: str) -> oracle.Oracle:
    """The model in transformers and here, with a draft head where its family has one."""
    built = oracle.build(MODELS[name])
    own = built if name.startswith("plain") else oracle.with_head(built)
    # The fleets of other tests know models by the same names.
    fleets.OTHERS[padded(name)] = oracle.split(oracle.declared(own.model), own.weights)
    return own


def model(name: str, mesh: str, formats: Formats = PLAIN) -> Model:
    """In the variant of a build for that mesh."""
    config, where = random(name).model.config, Mesh.parse(mesh)
    rules = sharding_rules.rules(where, experts=config.num_experts, tokens=where.axis("tp"))
    options = {"recurrent": F32, "dispatches": False, "local": True, "backend": "eager", "platform": Platform()}
    variant = deployed(config, formats, where, rules, **options)
    if name == "lite":
        variant = replace(variant, heads=heads_of(config, where.axis("tp"), powers=True))
    return replace(random(name).model, name=padded(name), config=replace(config, variant=variant))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_a_rank_of_an_npu_has_a_power_of_two_of_heads_over_latents(ranks):
    """Half of the published model's twenty are zeros more, whatever the layout; 128, 64 and 16 are what they are."""
    config = registry.find("glm-4.7-flash").model.config
    (padded,) = heads_of(config, ranks, powers=True)
    assert (padded.real, len(padded.places), padded.fields) == (20, 32, (("num_attention_heads", 32),))
    assert padded.places[:20] == tuple(range(20))
    assert [bool(heads_of(config, ranks)), bool(heads_of(replace(config, num_attention_heads=64), ranks, powers=True))] == [
        ranks > 4,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "tp", "drafts"),
    [
        ("plain", 4, 0),
        ("plain, three groups", 2, 0),
        ("plain, three groups", 4, 0),
        ("plain, two groups", 4, 0),
        ("gated", 2, 1),
        ("gated", 4, 0),
        ("fused", 2, 0),
        ("latent", 4, 1),
        ("lite", 2, 1),
        ("sparse", 4, 0),
    ],
)
@pytest.mark.short_cases("plain-4-0", "plain, three groups-2-0", "gated-2-1", "latent-4-1", "sparse-4-0")
def test_ranks_say_what_transformers_says(name, tp, drafts):
    """Prompts in two chunks, then decode steps; drafts are those of one device without padding."""
    small, batch = model(name, f"tp={tp}"), 4
    assert small.config.variant.heads
    one_device = replace(random(name).model, name=padded(name))
    fleet, alone = fleets.Fleet(small, Mesh.parse(f"tp={tp}"), drafts=drafts), fleets.OneDevice(one_device, drafts)
    serving = fleets.Serving(batch, drafts, [batch])
    for bucket, inputs in serving.steps(3):
        (ours,), want = fleet.step(bucket, inputs), alone.step(bucket, inputs[0])
        valid, live = fleets.valid_positions(bucket, inputs[0]), inputs[0]["request_slots"] > 0
        assert (ours["logits"][valid] - want["logits"][valid]).abs().max() < 1e-4
        assert all(torch.equal(ours[output][live], want[output][live]) for output in {"counts", "drafts"} & set(ours))
        before = [list(row) for row in serving.output[0]]
        serving.commit(bucket, inputs, [ours])
        for b, (prompt, old, row) in enumerate(zip(serving.prompts[0], before, serving.output[0], strict=True)):
            if len(row) > len(old):
                theirs = random(name).logits([*prompt, *row])[len(prompt) + len(old) - 1 : -1]
                assert (ours["logits"][b, : len(theirs)] - theirs).abs().max() < 1e-4
                assert row[len(old) :] == theirs.argmax(-1).tolist()
    assert all(len(row) > 3 for row in serving.output[0])


FORMS = [None, "w8a8_dynamic", "w8a8", "w4a8_dynamic", "w4a16"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "tp"), [("plain", 4), ("plain, two groups", 4), ("gated", 2), ("latent", 4)])
def test_a_rank_reads_its_heads_and_gets_its_slice_of_all_places(name, tp, form):
    formats = Formats((("*.self_attn.[qkvo]_proj", form), ("*.in_proj_qkv", form), ("*.in_proj_z", form))) if form else PLAIN
    own, mesh = model(name, f"tp={tp}", formats), Mesh.parse(f"tp={tp}")
    rules, checkpoint, compared = sharding_rules.rules(mesh, experts=own.config.num_experts, tokens=tp), fleets.OTHERS[padded(name)], 0
    for path, param in tree.flatten(own.params(F32)):
        if not {"q_heads", "kv_heads", "delta_heads"} & set(param.aval.axes):
            continue
        source, compared = param.source, compared + 1
        whole = source.join(*(checkpoint[each] for each in source.names))
        assert whole.shape == param.aval.shape, path
        for rank in range(tp):
            shard = slices.Shard(mesh, rules, rank)
            sliced = slices.sliced_axes([param], shard)
            regions = [
                slices.source_region(shape, each, shard, sliced) for shape, each in zip(source.shapes, param.source_axes, strict=True)
            ]
            read = []
            for each, region in zip(source.names, regions, strict=True):
                out = torch.empty(slices.region_shape(region))
                for there, here in slices.boxes(region):
                    out[here] = checkpoint[each][there]
                read.append(out)
            mine = source.join(*read)[slices.remaining_slice(param.aval, shard, sliced)]
            assert torch.equal(mine, whole[rules.local_slice(param.aval, mesh, rank)]), f"{path} of rank {rank}"
        if param.init != "quantised":
            parts = source.split(whole)
            assert all(torch.equal(part, checkpoint[each]) for part, each in zip(parts, source.names, strict=True))
    assert compared


def test_what_is_refused():
    with pytest.raises(PartitionError, match="16 ranks of a group cannot share num_attention_heads 6: 10 of 16 would be padding; legal"):
        grouped(6, 3, 16)
    own = SimpleNamespace(split_heads={"num_other_heads": 6}, num_key_value_heads=3)
    with pytest.raises(PartitionError, match="4 ranks of a group cannot share num_other_heads 6; legal are divisors of 6"):
        heads_of(own, 4)
    narrow = replace(random("plain").model.config, head_dim=4)
    variant = Variant(heads=heads_of(narrow, 4), formats=Formats((("*_proj", "w4a16"),), stored=True), padded=(("ffn", 4),))
    with pytest.raises(
        SpecError, match=r"its 10 heads are padded to 16 .*, and 8 int4 are packed; legal .* multiple of 8 channels, here 4"
    ):
        replace(random("plain").model, config=replace(narrow, variant=variant)).params(F32)


@dataclass(frozen=True)
class Following:
    """Sizes of a model whose heads become narrower the more there are."""

    num_attention_heads: int
    num_key_value_heads: int
    variant: Variant

    @property
    def head_dim(self) -> int:
        return 96 // self.num_attention_heads

    @property
    def split_heads(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_attention_heads}


def test_a_width_that_follows_from_the_number_of_heads_is_refused():
    own = Following(6, 3, PLAIN_VARIANT)
    assert widened(own) is own
    with pytest.raises(
        PartitionError, match=r"head_dim is 16 with .* 6.* and 12 with .* 8.*; heads are padded where their width is a field"
    ):
        widened(replace(own, variant=Variant(heads=heads_of(own, 4))))
