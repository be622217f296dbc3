"""tools/prove/small_model.py: the small model of a deployment is sharded and quantised, and exchanges tokens, as the large one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.manifests import DISPATCHED, DRAFTED, entry, manifest, physical

from npucompile.graphs import tree
from npucompile.graphs.types import Aval, Bucket, Leaf, Limits
from npucompile.models import draft_vocabulary
from npucompile.models.params import avals
from npucompile.models.quant.formats import Formats
from npucompile.models.variant import Variant
from npucompile.tools.artifact_model import full_model, with_variant
from npucompile.tools.builder.rank_memory import share
from npucompile.tools.prove import small_model
from npucompile.tools.prove.small_model import Form, small_buckets

F32, BF16 = torch.float32, torch.bfloat16
FULL, LINEAR = "full_attention", "linear_attention"


def test_buckets_of_one_form_share_a_small_one():
    entries = [entry("decode", batch, 4, DISPATCHED) for batch in range(1, 9)] + [entry("prefill", 1, q) for q in (3584, 64, 4096)]
    cases = small_buckets(entries, 2, 3, 60)
    images = [(case.bucket.name, [entry.bucket.batch * entry.bucket.q_len for entry in case.stands_for]) for case in cases]
    assert images == [
        ("prefill-b1-q192", [3584, 64, 4096]),
        ("decode-b1-q4", [4]),
        ("decode-b5-q4", [12, 20, 28]),
        ("decode-b4-q4", [8, 16, 24, 32]),
    ]


@pytest.mark.parametrize(
    ("bucket", "tp", "small"),
    [
        (Bucket("decode", 2, 1), 16, "decode-b4-q1"),
        (Bucket("decode", 1, 4), 16, "decode-b1-q4"),
        (Bucket("decode", 16, 4), 16, "decode-b16-q4"),
        (Bucket("decode", 64, 2), 1, "decode-b4-q2"),
        (Bucket("decode", 8, 1), 4, "decode-b8-q1"),
        (Bucket("decode", 4, 1), 4, "decode-b4-q1"),
        (Bucket("prefill", 1, 100), 4, "prefill-b1-q100"),
        (Bucket("prefill", 1, 2048), 8, "prefill-b1-q192"),
        (Bucket("prefill", 1, 2080), 8, "prefill-b1-q160"),
        (Bucket("prefill", 1, 999), 4, "prefill-b1-q191"),
        (Bucket("prefill", 9, 3584), 8, "prefill-b4-q192"),
        (Bucket("prefill", 8, 3584), 8, "prefill-b8-q192"),
        (Bucket("prefill", 2, 2048), 4, "prefill-b2-q192"),
    ],
)
def test_a_small_bucket_has_the_form_of_the_large_one(bucket, tp, small):
    (case,) = small_buckets([entry(bucket.kind, bucket.batch, bucket.q_len)], tp, 3, 60)
    assert case.bucket.name == small
    assert Form.of(case.bucket, tp, "none") == Form.of(bucket, tp, "none")


def test_a_small_chunk_is_shared_as_the_large_one() -> None:
    (case,) = small_buckets([entry("prefill", 1, 16_000)], 5, 1, 60, sliced=True)
    assert (case.bucket.name, case.form.sliced) == ("prefill-b1-q320", True)
    assert not Form.of(Bucket("decode", 4, 4), 2, "none", sliced=True).sliced


@pytest.mark.parametrize(("experts", "more"), [(512, 0), (528, 4)])
def test_a_small_model_has_copies_where_the_large_one_has_and_its_reference_none(experts, more):
    shrunk = small_model.shrink(manifest(params=physical(experts, 4)), 3)
    logical, model = shrunk.model.config.num_experts, shrunk.model_in(BF16)
    assert (model.config.variant.physical_experts, model.config.variant.expert_ranks) == (logical + more, 4)
    for layer in model.placement.layers:
        assert set(layer) == set(range(logical))
        assert layer[:logical] != tuple(range(logical))
    assert len(set(model.placement.layers)) > 1
    assert shrunk.reference.config.variant.physical_experts == 0
    assert not any("physical" in path for path, _ in tree.flatten(shrunk.reference.params(F32)))


def test_exchange_forms_are_told_apart():
    parts = ["moe_dispatch"] * 243
    graphs = (entry("prefill", 1, 4096), entry("prefill", 1, 512, DISPATCHED), entry("prefill", 1, 2048, DRAFTED))
    graphs = (*graphs, entry("prefill", 1, 1024, parts))
    small = small_model.shrink(manifest(graphs=graphs), 3)
    limits = {case.form.dispatched: small.model_for(case, F32).config.variant.most_dispatched for case in small.cases}
    (split,) = (case for case in small.cases if case.form.dispatched == "parts")
    assert (split.form.parts, {case.form.parts for case in small.cases if case is not split}) == (4, {1}), "60 layers and three drafts"
    assert limits == {"none": 0, "all": Variant().most_dispatched, "drafts": 1, "parts": -(-split.bucket.tokens // 8)}
    assert [small.model_for(case, F32).config.variant.dispatches_in_parts for case in small.cases] == [c is split for c in small.cases]
    # Without drafts every dispatch belongs to a layer.
    assert [small_model.dispatched(graph, 0, 60) for graph in graphs] == ["none", "all", "all", "parts"]


def test_a_step_of_few_drafts_and_few_layers_dispatches_all():
    """A step of two tokens makes one draft, whatever the model's other steps make: of three dispatches two are of layers."""
    (case,) = small_buckets([entry("decode", 2, 2, ["moe_dispatch"] * 3)], 2, 3, 2)
    assert (case.form.dispatched, case.form.parts) == ("all", 1)


@pytest.mark.parametrize(("tp", "batch", "small"), [(2, 300, "decode-b4-q4"), (16, 512, "decode-b16-q4"), (16, 1000, "decode-b8-q4")])
def test_a_small_step_that_dispatches_in_drafts_alone_has_too_many_other_tokens(tp, batch, small):
    """Its layers gather because they have more tokens than a device may dispatch; so must those of the small step."""
    shrunk = small_model.shrink(manifest(mesh=f"dp=1,tp={tp}", graphs=(entry("decode", batch, 4, DRAFTED),)), 3)
    (case,) = shrunk.cases
    assert case.bucket.name == small
    most = shrunk.model_for(case, F32).config.variant.most_dispatched
    assert share(case.bucket, case.bucket.batch, tp) <= most < share(case.bucket, case.bucket.tokens, tp)


def test_a_small_model_has_the_variant_of_the_large_one():
    small = small_model.shrink(manifest(mesh="dp=1,tp=16"), 3)
    variant = full_model(manifest(mesh="dp=1,tp=16")).config.variant
    assert small.shipped.config.variant == variant
    assert small.model.config.variant == replace(variant, recurrent=F32)
    assert small.reference.config.variant == replace(variant, kv_repeat=1, recurrent=F32, grouped=False, padded=())
    assert (small.model_in(F32), small.model_in(BF16)) == (small.model, small.shipped)
    assert small.requests == 3
    width, longest = 4, 192 + small_model.PROMPT_EXCESS + 4 * (1 + 3)
    assert (small.limits.slots_per_request, small.limits.drafts) == (width, 3)
    assert small.limits.max_model_len >= longest
    assert small.limits.num_pages > 1 + small.requests * small.limits.pages_per_request
    assert small.limits.num_slots > 1 + small.requests * width
    assert small.limits.num_request_slots > 1 + small.requests


def test_a_model_drafts_as_its_artifact_does():
    for drafts in (0, 2):
        limits = Limits(128, 1000, 1 + 100 * (drafts + 1), 4096, drafts + 1, drafts)
        graphs = (entry("prefill", 1, 512), entry("decode", 4, drafts + 1))
        small = small_model.shrink(manifest(graphs=graphs, limits=limits), 1)
        for model in (small.shipped, small.model, small.reference, full_model(manifest(limits=limits))):
            assert model.drafting == (drafts > 0)
            assert ("mtp" in model.params(F32)) == (drafts > 0)
        names = small_model.random_checkpoint(small.model, torch.Generator().manual_seed(0))
        assert any(name.startswith("mtp.") for name in names) == (drafts > 0)


def test_log_probabilities_are_of_as_many_tokens_as_in_the_artifact():
    def with_logprobs(most):
        outputs = (Leaf("outputs.tokens", Aval((4, 4), torch.int32)), Leaf("outputs.top_ids", Aval((4, 4, most), torch.int32)))
        return replace(entry("decode", 4, 4), outputs=outputs)

    assert small_model.shrink(manifest(graphs=(entry("prefill", 1, 512), with_logprobs(5))), 1).max_logprobs == 5
    assert small_model.shrink(manifest(), 1).max_logprobs == 0


def test_float_experts_are_compared_with_a_checkpoints_form():
    small = small_model.shrink(manifest(quantization="none"), 1)
    assert (small.model.config.variant.grouped, small.reference.config.variant.grouped) == (True, False)


def test_experts_that_are_split_in_an_artifact_are_split_here():
    spread, split = (
        small_model.shrink(manifest(mesh="tp=2", rules=rules), 1) for rules in ({"experts": ("dp", "tp")}, {"expert_ffn": ("tp",)})
    )
    assert [small.rules().num_shards("experts", small.mesh) for small in (spread, split)] == [2, 1]
    assert dict(split.shipped.config.variant.shards)["expert_ffn"] == 2
    assert (spread.shipped.config.variant.most_dispatched > 0, split.shipped.config.variant.most_dispatched) == (True, 0)


def test_drafts_read_the_first_rows_of_the_head():
    model = small_model.shrink(manifest(mesh="dp=1,tp=4"), 1).model
    model = with_variant(model, replace(model.config.variant, draft_vocab=32))
    params = small_model.model_params(model, small_model.random_checkpoint(model, torch.Generator().manual_seed(0)))
    named = dict(zip((name for name, _ in tree.flatten(model.params(F32))), params, strict=True))
    assert named["head"].shape[0] > 32
    assert torch.equal(named[draft_vocabulary.KEY], named["head"][:32])


def test_groups_of_a_recipe_are_as_wide_as_small_experts():
    small = small_model.shrink(manifest(name="qwen3-30b-a3b", mesh="dp=1", quantization="w4a8"), 1)
    assert (full_model(manifest(name="qwen3-30b-a3b")).config.variant.formats.group, small.model.config.variant.formats.group) == (64, 32)
    assert small.model.params(F32)


def test_each_kind_of_layer_is_there_in_all_its_formats():
    """Experts of layers 41 to 47 of 48 stay int8; the last of the small model's four stands for them."""
    small = small_model.shrink(manifest(name="qwen3-30b-a3b", mesh="dp=1", quantization="w4a8"), 1)
    experts = [small.model.config.variant.formats.of([f"model.layers.{i}.mlp.experts.gate_up_proj"]) for i in range(4)]
    assert experts == ["w4a8_dynamic"] * 3 + ["w8a8_dynamic"]
    rules = (("model.layers.1.mlp", "w8a8"), ("model.layers.9.*", "w8a8_dynamic"), ("*", "w4a8_dynamic"))
    formats = Formats(rules, biased=("model.layers.9.a", "model.layers.10.a", "b"), kv_cache=(("model.layers.8.self_attn", "int8"),))
    assert small_model._of_small_layers(formats, ["x"] + ["y"] * 8 + ["z"], ["x", "y", "y", "z"]) == Formats(
        (("model.layers.1.mlp", "w8a8"), ("model.layers.3.*", "w8a8_dynamic"), ("*", "w4a8_dynamic")),
        biased=("model.layers.3.a", "model.layers.4.a", "b"),
        kv_cache=(),
    )


@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4a8"])
def test_one_checkpoint_loads_in_every_variant(quantization):
    small = small_model.shrink(manifest(mesh="dp=1,tp=4", quantization=quantization), 1)
    tensors = small_model.random_checkpoint(small.model, torch.Generator().manual_seed(0))
    for model, dtype in ((small.model, F32), (small.reference, F32), (small.shipped, BF16)):
        params = small_model.model_params(model, tensors, dtype)
        declared = tree.flatten(avals(model.params(dtype)))
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in params] == [(aval.shape, aval.dtype) for _, aval in declared]
        assert all(tensor.is_contiguous() for tensor in params)
    sharded, whole = (
        dict(zip((name for name, _ in tree.flatten(model.params(F32))), small_model.model_params(model, tensors), strict=True))
        for model in (small.model, small.reference)
    )
    key = "layers.3.mixer.qkv" if quantization == "none" else "layers.3.mixer.qkv.scale"
    # Four query heads with their gates, and two key-value heads that are copied once.
    assert (sharded[key].shape[0], whole[key].shape[0]) == (12 * 32, 10 * 32)
    assert torch.equal(sharded["layers.0.mixer.qkvzba"], whole["layers.0.mixer.qkvzba"])
    assert min(float(tensor.float().abs().max()) for tensor in tensors.values()) > 0
    norms = [tensor for name, tensor in tensors.items() if "norm" in name]
    assert all(float(norm.std()) > 0.05 for norm in norms)


@pytest.mark.parametrize(
    ("bucket", "tp", "talks", "small"),
    [
        (Bucket("decode", 32, 4), 2, ["fused_experts_w4a8"] * 60 + DRAFTED, "decode-b12-q4"),
        (Bucket("decode", 4, 4), 2, ["moe_dispatch"] * 63, "decode-b4-q4"),
        (Bucket("prefill", 1, 2048), 2, ["fused_experts_w4a8"] * 120 + DRAFTED, "prefill-b1-q192"),
        (Bucket("prefill", 1, 2048), 8, ["fused_experts_w4a8"] * 120 + DRAFTED, "prefill-b1-q384"),
    ],
)
def test_small_steps_with_fused_experts_have_the_tokens_that_these_want(bucket, tp, talks, small):
    shrunk = small_model.shrink(manifest(mesh=f"dp=2,tp={tp}", graphs=(entry(bucket.kind, bucket.batch, bucket.q_len, talks),)), 3)
    (case,) = shrunk.cases
    assert case.bucket.name == small
    variant = shrunk.model_for(case, F32).config.variant
    fused = "fused_experts_w4a8" in talks
    assert (case.form.fused, variant.fuses(share(case.bucket, case.bucket.tokens, tp))) == (fused, fused)
