"""models/padding.py: sizes that ranks share evenly, zeros at their end, and padding that is neither read, sampled nor ranked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fleets

from npucompile.graphs import tree
from npucompile.graphs.errors import PartitionError, SpecError
from npucompile.graphs.types import Mesh
from npucompile.models import sharding_rules, slices
from npucompile.models.padding import padded_size, paddings
from npucompile.models.quant.formats import Formats
from npucompile.models.sampling import best
from npucompile.models.variant import PLAIN, Variant

F32 = torch.float32


def variant(ranks: int, form: str | None = None) -> Variant:
    formats = Formats((("*_proj", form),)) if form else PLAIN.formats
    return Variant(formats=formats, padded=(("vocab", ranks), ("ffn", ranks)), shards=(("ffn", ranks),) if form else ())


@given(size=st.integers(1, 300_000), ranks=st.integers(1, 64))
def test_a_size_is_rounded_up_to_what_ranks_share_and_none_has_padding_alone(size, ranks):
    try:
        padded = padded_size(size, ranks)
    except PartitionError as error:
        most = int(str(error).rpartition(" ")[2])
        assert 0 < most < ranks
        assert padded_size(size, most) >= size
        return
    assert padded % ranks == 0
    assert size <= padded < size + ranks
    assert padded // ranks * (ranks - 1) < size


def test_published_sizes():
    assert padded_size(151_643, 8) == 151_648
    assert padded_size(151_936, 16) == 151_936
    with pytest.raises(PartitionError, match=r"8 ranks cannot share 9 elements: some would have padding alone; legal are up to 5"):
        padded_size(9, 8)


def test_what_is_padded_is_said_once():
    model = fleets.model(variant(4), name="plain-odd")
    declared = model.family.abstract_params(model.config, F32)
    assert sorted(paddings(declared, model.config.variant)) == [("ffn", 31, 32, 4), ("vocab", 41, 44, 4)]
    assert not list(paddings(declared, PLAIN))
    even = fleets.model(variant(4), name="plain")
    assert even.params(F32) == fleets.model(PLAIN, name="plain").params(F32) or not list(paddings(even.params(F32), variant(4)))


@pytest.mark.parametrize("form", [None, "w8a8_dynamic", "w8a8", "w4a8_dynamic", "w4a16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_elements_and_gets_its_slice_of_the_padded_parameter(ranks, form):
    """Of quantised matrices too: the scales of channels of padding are zeros, and their integers."""
    model, checkpoint, mesh = (
        fleets.model(variant(ranks, form), name="plain-odd"),
        fleets.tensors(False, "plain-odd"),
        Mesh.parse(f"tp={ranks}"),
    )
    rules = sharding_rules.rules(mesh)
    for name, param in tree.flatten(model.params(F32)):
        source, axes = param.source, param.source_axes
        if not {"vocab", "ffn"} & set(param.aval.axes):
            continue
        whole = source.join(*(checkpoint[each] for each in source.names))
        assert whole.shape == param.aval.shape, name
        for rank in range(ranks):
            shard = slices.Shard(mesh, rules, rank)
            sliced = slices.sliced_axes([param], shard)
            regions = [slices.source_region(shape, each, shard, sliced) for shape, each in zip(source.shapes, axes, strict=True)]
            read = [checkpoint[each][tuple(run for (run,) in region)] for each, region in zip(source.names, regions, strict=True)]
            mine = source.join(*read)[slices.remaining_slice(param.aval, shard, sliced)]
            assert torch.equal(mine, whole[rules.local_slice(param.aval, mesh, rank)]), f"{name} of rank {rank}"


def test_splitting_gives_the_checkpoint_back():
    model, checkpoint = fleets.model(variant(4), name="plain-odd"), fleets.tensors(False, "plain-odd")
    for _, param in tree.flatten(model.params(F32)):
        tensors = [checkpoint[name] for name in param.source.names]
        for back, tensor in zip(param.source.split(param.source.join(*tensors)), tensors, strict=True):
            assert torch.equal(back, tensor)


@pytest.mark.parametrize("form", ["w4a8_dynamic", "w4a16"])
def test_int4_that_ranks_would_share_an_element_of_is_refused(form):
    """Floats that are rounded on loading are padded before they are packed; 31 channels of a checkpoint end within an element."""
    own = variant(4, form)
    message = r"gate_proj.weight: its ffn is padded to 32 for the ranks that share it, and int4 are packed; legal .* here 31 and 8, that 8"
    with pytest.raises(SpecError, match=message):
        fleets.model(replace(own, formats=replace(own.formats, stored=True)), name="plain-odd").params(F32)
    with pytest.raises(SpecError, match="here 31 and 4, that 8 divides"):
        fleets.model(replace(own, padded=(("ffn", 8),)), name="plain-odd").params(F32)


def test_the_most_likely_token_is_none_of_the_padding():
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0, 7.0]])
    assert best(logits).tolist() == [4]
    assert best(logits, 3).tolist() == [1]


@pytest.mark.parametrize("emit", [True, False], ids=["all rows everywhere", "a share of the rows each"])
def test_sampled_tokens_and_log_probabilities_are_those_without_padding(emit):
    """All of the vocabulary is ranked: 20 most likely, at a temperature that makes logits of zero likely."""
    ranks, batch = 4, 4
    copies = Variant(kv_repeat=2, padded=variant(ranks).padded)
    options = {"drafts": 1, "max_logprobs": 20}
    sharded = fleets.Fleet(fleets.model(copies, experts=False, name="odd"), Mesh.parse("tp=4"), emit_logits=emit, **options)
    alone = fleets.Fleet(fleets.model(PLAIN, experts=False, name="odd"), Mesh(), **options)
    serving = fleets.Serving(batch, 1, [batch])
    for bucket, (greedy,) in serving.steps(2):
        column = torch.arange(greedy["uniform"].shape[1]) * 0.37
        numbers = (torch.linspace(0.05, 0.95, batch)[:, None] * 7 + column) % 1
        inputs = [
            {**greedy, "temperature": torch.full((batch,), 9.0), "uniform": numbers, "logprobs": torch.ones(batch, dtype=torch.int32)}
        ]
        (ours,), (want,) = sharded.step(bucket, inputs), alone.step(bucket, inputs)
        valid = fleets.valid_positions(bucket, inputs[0])
        assert set(ours) ^ set(want) == (set() if emit else {"logits"})
        for name, value in ours.items():
            assert value.shape == want[name].shape
            pair = (value, want[name]) if name in ("counts", "drafts") else (value[valid], want[name][valid])
            torch.testing.assert_close(*pair, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        serving.commit(bucket, inputs, [want])
