"""tools/builder/plan.py: the choices of a plan, and the options it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs.errors import PartitionError, SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.models import registry
from npucompile.models.presets import PRESETS
from npucompile.models.quant.formats import Formats
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.variant import MOST_DISPATCHED
from npucompile.tools.builder import deployments
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.deviations import source_of
from npucompile.tools.builder.fit import FEWER_DISPATCHED
from npucompile.tools.builder.plan import Options
from npucompile.tools.notation import PrefillSize
from npucompile.tools.quantize.driver import QuantizeSettings, _formats

ENDS = "responses end at token 256 (config.json)"


def test_a_plan_of_a_checkpoint(tiny_checkpoint):
    plan = planning.plan(Options(str(tiny_checkpoint), (1, 2, 4), (PrefillSize(16), PrefillSize(4)), 64, None, "float32", "eager"))
    assert plan.buckets == (
        Bucket("prefill", 1, 4), Bucket("prefill", 1, 16), Bucket("decode", 1, 4), Bucket("decode", 2, 4), Bucket("decode", 4, 4),
    )  # fmt: skip
    assert plan.limits.with_bitmasks(0, 0).with_adjustments(0, 0) == Limits(
        page_size=16, num_pages=1 + 4 * 4, num_slots=1 + 4 * 4 + 4, max_model_len=64, slots_per_request=4, drafts=3, checkpoint_slots=4
    )
    assert plan.dtype == torch.float32
    assert plan.references == ()
    assert plan.notes == ("each step drafts 3 tokens and verifies them in the next (--speculative-tokens to change)", ENDS)
    assert plan.eos_ids == (tiny.EOS,)
    assert (plan.model.drafting, plan.max_logprobs) == (True, 20)


def test_a_model_without_a_draft_head_drafts_nothing(tmp_path):
    plan = tiny.planned(tiny.write_checkpoint(tmp_path / "headless", mtp_num_hidden_layers=0))
    assert plan.limits.with_bitmasks(0, 0).with_adjustments(0, 0) == Limits(page_size=16, num_pages=17, num_slots=5, max_model_len=64)
    assert {bucket.q_len for bucket in plan.buckets if bucket.kind == "decode"} == {1}
    assert (plan.notes, plan.model.drafting, plan.max_logprobs) == ((ENDS,), False, 20)
    assert plan == planning.plan(tiny.options_of(plan.arguments))


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_as_many_drafts_as_are_asked_for(tiny_checkpoint, drafts):
    plan = tiny.planned(tiny_checkpoint, num_speculative_tokens=drafts, backend="null")
    assert (plan.limits.drafts, plan.limits.slots_per_request, plan.limits.num_request_slots) == (drafts, drafts + 1, 5)
    assert {bucket.q_len for bucket in plan.buckets if bucket.kind == "decode"} == {drafts + 1}
    assert (plan.model.drafting, plan.notes) == (drafts > 0, (ENDS,))


@pytest.mark.parametrize(("asked", "rows", "words"), [(None, 8, 9), (3, 3, 9), (0, 0, 0)])
def test_structured_output_has_bitmasks_over_the_vocabulary(tiny_checkpoint, asked, rows, words):
    plan = tiny.planned(tiny_checkpoint, structured_outputs=asked)
    assert (plan.limits.bitmasks, plan.limits.bitmask_words) == (rows, words)
    assert plan.arguments[plan.arguments.index("--structured-outputs") + 1] == str(rows)


@pytest.mark.parametrize(("asked", "tables"), [(None, 8), (3, 3), (0, 0)])
def test_logits_are_adjusted_where_a_build_says_so(tiny_checkpoint, asked, tables):
    plan = tiny.planned(tiny_checkpoint, logit_adjustments=asked)
    assert (plan.limits.logit_adjustments, plan.limits.adjusted_tokens) == (tables, 260 if tables else 0)
    assert plan.arguments[plan.arguments.index("--logit-adjustments") + 1] == str(tables)
    on_npus = tiny.planned_device(tiny_checkpoint, mesh="", logit_adjustments=asked)
    assert on_npus.limits.logit_adjustments == (asked or 0)


def test_a_context_shorter_than_the_default_is_taken_whole(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "short", max_position_embeddings=100)
    assert planning.plan(Options(str(model), dtype="float32")).limits.max_model_len == 96


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 40}, r"max_model_len is 40; .*multiple of 16 up to 256"),
        ({"max_model_len": 272}, r"max_model_len is 272; .*up to 256"),
        ({"max_num_seqs": 3}, r"max_num_seqs is 3 and the largest bucket has 4 rows; legal is at least that many"),
        ({"buckets": ()}, r"no decode buckets; legal is at least one"),
        ({"prefill": (128, 256)}, r"no prefill of 128,256 tokens fits max_model_len 64; legal are sizes from 1 to 64"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(tiny_checkpoint, options, message):
    with pytest.raises(SpecError, match=message):
        tiny.planned(tiny_checkpoint, **options)


def test_buckets_in_any_order_and_twice_are_one_set(tiny_checkpoint):
    assert tiny.planned(tiny_checkpoint, buckets=(4, 1, 4, 2)) == tiny.planned(tiny_checkpoint)


def same(first, second):
    """Whether two plans are equal but for where their model was found."""
    return replace(second, source=first.source, model=replace(second.model, name=first.model.name)) == first


OTHER = {"buckets": (2, 3), "prefill": (4, 5, 7), "max_num_seqs": 9, "dtype": "bfloat16", "backend": "null"}
NEITHER = {"num_speculative_tokens": 0, "max_logprobs": 0}
FEW = {"num_speculative_tokens": 1, "max_logprobs": 5}


PREBUILT = {
    "target": "ascend-a3",
    "backend": "ge",
    "ge_kernels": "prebuilt",
    "no_overlap": True,
    "num_speculative_tokens": 1,
    "max_model_len": 128,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("changes", [{}, OTHER, NEITHER, FEW, PREBUILT])
def test_its_arguments_make_the_same_plan(monkeypatch, tmp_path, tiny_checkpoint, changes):
    monkeypatch.chdir(tiny_checkpoint.parent)
    plan = tiny.planned("tiny", **changes)
    arguments = plan.arguments
    monkeypatch.chdir(tmp_path)
    again = planning.plan(tiny.options_of(arguments))
    # What is said was not chosen.
    assert replace(again, source=plan.source, model=replace(again.model, name="tiny"), notes=plan.notes) == plan
    assert again.source.checkpoint_dir.samefile(tiny_checkpoint)


# --- several ranks on this machine ---


def test_more_ranks_than_key_value_heads_hold_copies(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    model = tiny.write_checkpoint(tmp_path / "model", **sizes)
    copies = {mesh: tiny.planned(model, mesh=mesh).model.config.variant.kv_repeat for mesh in ("", "tp=2", "tp=4", "dp=4,tp=1")}
    assert copies == {"": 1, "tp=2": 1, "tp=4": 2, "dp=4,tp=1": 1}


ODD = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "shared_expert_intermediate_size": 18, "vocab_size": 264,
}  # fmt: skip


EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


@pytest.mark.parametrize(
    ("mesh", "sizes", "error", "message"),
    [
        ("tp=16", ODD, SpecError, r"tp=16: 16 ranks of a group cannot share num_attention_heads 6: 10 of 16 would be padding; legal are"),
        (
            "dp=1,tp=4",
            {**EVEN, "linear_num_key_heads": 4, "vocab_size": 5},
            PartitionError,
            r"4 ranks cannot share 5 elements: some would have padding alone; legal are up to 3",
        ),
        ("tp=6", ODD, SpecError, r"6 ranks of a group cannot share linear_num_key_heads 2: 4 of 6 would be padding"),
        ("dp=3", {}, PartitionError, r"4 experts over the 3 devices of mesh dp=3: .* legal are meshes whose size divides 4"),
        ("ep=2", {}, SpecError, r"mesh ep=2: unknown axis 'ep'; legal are dp and tp"),
    ],
)
def test_a_mesh_the_model_does_not_spread_over_is_refused_before_anything_is_traced(tmp_path, mesh, sizes, error, message):
    model = tiny.write_checkpoint(tmp_path / "model", **sizes)
    with pytest.raises(error, match=message):
        tiny.planned(model, mesh=mesh)


# --- builds for NPUs ---

BIG = "qwen3.5-397b"
SPLIT = "qwen35-397b-a3x24-pd-1p1d-3node"
ROWS = [(row.id, name) for row in deployments.deployments().values() if row.model == BIG for name in row.phases]


def options_for(row, phase):
    return Options(BIG, deployment=row, phase=None if phase == "mixed" else phase)


@pytest.mark.parametrize(("name", "phase"), ROWS)
def test_every_published_deployment_of_the_big_model_plans_as_published(name, phase):
    plan, row = planning.plan(options_for(name, phase)), deployments.deployment(name)
    part = row.phase(phase)
    assert (plan.backend, plan.target.name, plan.mesh, plan.phase, plan.deployment) == ("ge", row.target, part.mesh, phase, name)
    assert (plan.quantization, plan.dtype, plan.target.local) == (row.quantization, torch.bfloat16, False)
    assert plan.limits.with_bitmasks(0, 0).with_adjustments(0, 0) == deployments.limits_for(row, part, 128)
    width = part.num_speculative_tokens + 1
    decode = [Bucket("decode", batch, width) for batch in part.buckets]
    prefill = [] if phase == "decode" else [Bucket("prefill", n, tokens) for tokens, n in deployments.prefill_sizes(row)]
    assert plan.buckets == (*prefill, *decode)
    variant, tp = plan.model.config.variant, plan.mesh.axis("tp")
    assert variant.kv_repeat == max(1, tp // 2)
    formats = [variant.formats.of([f"model.layers.3.{name}"]) for name in ("self_attn.q_proj.weight", "mlp.experts.down_proj")]
    assert formats == ["w8a8_dynamic", f"{row.quantization}_dynamic"]
    assert variant.recurrent == torch.bfloat16
    assert variant.most_dispatched in ((FEWER_DISPATCHED, MOST_DISPATCHED) if row.target == "ascend-a3" else (0,))
    assert dict(plan.rules().table)["experts"] == ("dp", "tp")
    assert plan.params_bytes + plan.state_bytes < 50 * 2**30


OTHER_ROWS = [
    (row.id, name)
    for row in deployments.deployments().values()
    if row.model != BIG and row.model in registry.presets()
    for name in row.phases
]


@pytest.mark.parametrize(
    ("name", "phase"), [pytest.param(*row, marks=pytest.mark.long if number % 2 else ()) for number, row in enumerate(OTHER_ROWS)]
)
def test_every_other_published_deployment_plans_as_published_or_says_what_differs(name, phase):
    row = deployments.deployment(name)
    part, source = row.phase(phase), source_of(row)
    plan = planning.plan(Options(row.model, deployment=name, phase=None if phase == "mixed" else phase))
    drafts = part.num_speculative_tokens if source.has_draft_head else 0
    assert (plan.mesh, plan.phase, plan.quantization) == (part.mesh, phase, "none" if row.quantization == "bf16" else row.quantization)
    assert {bucket.q_len for bucket in plan.buckets if bucket.kind == "decode"} <= {drafts + 1}
    assert [bucket.batch for bucket in plan.buckets if bucket.kind == "decode"] == list(part.buckets)
    prefill = [] if phase == "decode" else deployments.prefill_sizes(row)
    assert [(bucket.q_len, bucket.batch) for bucket in plan.buckets if bucket.kind == "prefill"] == list(prefill)
    assert sum("a step drafts nothing" in note for note in plan.notes) == (drafts != part.num_speculative_tokens)
    assert ("experts" in dict(plan.rules().table)) == (part.ep > 1)
    wanted = deployments.limits_for(row, replace(part, num_speculative_tokens=drafts), 128)
    assert (plan.limits.num_pages < wanted.num_pages) == any("weights and state would leave less than" in note for note in plan.notes)
    held = plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)
    assert held < 57 * 2**30
    # Each rank of a group has copies of norms, routers and, where they are few, of key-value heads.
    if row.quantization == "w8a8" and not plan.model.config.num_experts and not plan.source.draft:
        assert plan.params_bytes * plan.mesh.axis("tp") < (38 if "27b" in row.model and plan.mesh.axis("tp") > 4 else 37) * 1e9


def test_the_big_model_alone_is_its_default_deployment():
    plan = planning.plan(Options(BIG))
    assert plan == planning.plan(Options(BIG, deployment=deployments.DEFAULT[BIG])) == planning.plan(Options(BIG, backend="ge"))
    assert (str(plan.mesh), plan.quantization, plan.limits.slots_per_request) == ("dp=8,tp=2", "w4a8", 4)
    more = planning.plan(Options(BIG, buckets=tuple(range(2, 65, 2))))
    assert [bucket.batch for bucket in more.buckets if bucket.kind == "decode"] == list(range(2, 65, 2))
    assert (more.limits.num_slots - 1) // 4 == 64
    assert more.limits.num_pages == plan.limits.num_pages


CHANGES = ({"max_num_seqs": 200}, {"max_model_len": 1024, "prefill": (PrefillSize(128), PrefillSize(512)), "quantization": "w8a8"})


@pytest.mark.parametrize(("name", "phase", "changes"), [*((*row, {}) for row in ROWS), *((*ROWS[0], changes) for changes in CHANGES)])
def test_arguments_of_a_deployment_make_the_same_plan(name, phase, changes):
    plan = planning.plan(replace(options_for(name, phase), **changes))
    assert planning.plan(tiny.options_of(plan.arguments)) == plan


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mesh": None},
        {"num_speculative_tokens": 0, "quantization": "w8a8", "dtype": "bfloat16"},
        {"max_logprobs": 4},
        {"weights": "bound"},
        {"cann": "9.0", "operator_packages": ("vllm-ascend", "sgl-kernel-npu")},
    ],
)
def test_arguments_of_a_target_make_the_same_plan(tmp_path, changes):
    plan = tiny.planned_device(tiny.write_checkpoint(tmp_path / "model", **tiny.NPU_SIZES), **{"weights": "stored", **changes})
    assert same(plan, planning.plan(tiny.options_of(plan.arguments)))


def test_what_a_target_alone_leaves_open_is_chosen(tmp_path):
    for heads in (0, 1):
        sizes = {**tiny.NPU_SIZES, "max_position_embeddings": 300, "mtp_num_hidden_layers": heads}
        model = tiny.write_checkpoint(tmp_path / f"model-{heads}", **sizes)
        plan = planning.plan(Options(str(model), target="ascend-a3", mesh="tp=2"))
        width = 1 + 3 * heads
        assert plan.limits.with_bitmasks(0, 0).with_adjustments(0, 0) == Limits(128, 1 + 16 * 2, 1 + 16 * width, 256, width, 3 * heads)
        # A prompt of three tokens takes a step of 128, and not one of the longest chunk.
        prefill = ["prefill-b1-q128", "prefill-b1-q256"]
        assert [bucket.name for bucket in plan.buckets] == [*prefill, *(f"decode-b{n}-q{width}" for n in (1, 2, 4, 8, 16))]
        assert (plan.quantization, plan.phase, plan.deployment, plan.published) == ("none", "mixed", "", False)
        # A device would compute them for every row of every step.
        assert plan.max_logprobs == 0
        assert planning.plan(Options(str(model), target="ascend-a3", mesh="tp=2", max_logprobs=5)).max_logprobs == 5


def test_a_deployment_says_that_its_context_is_shorter_than_the_models():
    plan = planning.plan(options_for(SPLIT, "prefill"))
    length, longest = plan.limits.max_model_len, plan.source.max_position_embeddings
    assert length < longest
    assert f"context {length} of {longest} tokens (--max-model-len to change)" in plan.notes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deployment": "dsr1-a3x8-mix-2k-2k-50ms"}, SpecError, r"dsr1-a3x8-mix-2k-2k-50ms is of deepseek-r1, the model is qwen3.5-397b"),
        ({"deployment": SPLIT, "target": "cpu"}, SpecError, SPLIT + r" is for ascend-a3, the target is cpu"),
        ({"phase": "decode"}, SpecError, r"in3k5-out1k5-50ms has no phase 'decode'; legal are mixed"),
        ({"phase": "decode", "target": "ascend-a3"}, SpecError, r"--phase decode is one side of a deployment that splits them; name it"),
        ({"phase": "decode", "backend": "null"}, SpecError, r"--phase decode is one side of a deployment that splits them; name it"),
        ({"target": "cpu", "backend": "ge"}, SpecError, r"--backend ge is for NPUs; name a --deployment, or a --target"),
        ({"target": "ascend-a3", "backend": "inductor"}, SpecError, r"--backend inductor makes nothing that ascend-a3 runs; legal are ge"),
        ({"backend": "eager", "deployment": SPLIT}, SpecError, r"makes nothing that ascend-a3 runs; legal are ge, aclgraph, null"),
        ({"target": "ascend-a3", "mesh": "tp=64"}, SpecError, r"64 ranks of a group cannot share num_attention_heads 32"),
        ({"operator_packages": ("mystery",)}, SpecError, r"operator packages mystery are not known; legal are sgl-kernel-npu, vllm-ascend"),
        (
            {"target": "cpu", "backend": "null", "cann": "8.5"},
            SpecError,
            r"--cann, --operator-packages and --ge-kernels are for NPUs, the target is cpu",
        ),
        ({"target": "cpu", "backend": "null", "ge_kernels": "prebuilt"}, SpecError, r"and --ge-kernels are for NPUs, the target is cpu"),
        (
            {"target": "ascend-a3", "backend": "aclgraph", "ge_kernels": "prebuilt"},
            SpecError,
            r"--ge-kernels prebuilt with --backend aclgraph",
        ),
        ({"target": "cpu", "backend": "null", "no_overlap": True}, SpecError, r"--no-overlap and --prefetch-weights are for NPUs"),
        ({"target": "cpu", "backend": "null", "prefetch_weights": True}, SpecError, r"--no-overlap and --prefetch-weights are for NPUs"),
        ({"target": "ascend-a3", "no_overlap": True, "prefetch_weights": True}, SpecError, r"legal is one of them"),
        (
            {"target": "ascend-a2", "mesh": "dp=2,tp=8", "expert_combine_dtype": "int8"},
            SpecError,
            r"--expert-combine-dtype int8 for ascend-a2, mesh dp=2,tp=8, experts in \w+; legal is that for an Atlas A3",
        ),
        (
            {"target": "ascend-a3", "mesh": "dp=2,tp=8", "expert_combine_dtype": "int8", "quantization": "none"},
            SpecError,
            r"experts in float; legal is that for an Atlas A3 whose ranks share experts that read int8",
        ),
        ({"dtype": "float32"}, SpecError, r"dtype float32 for ascend-a3: its fused operators take bfloat16"),
        ({"max_model_len": 1000}, SpecError, r"max_model_len is 1000; .* on ascend-a3 is a multiple of 128 up to 262144"),
        ({"max_model_len": 2**20}, SpecError, r"max_model_len is 1048576; .*up to 262144"),
        ({"max_num_seqs": 10}, SpecError, r"max_num_seqs is 10 and the largest bucket has 54 rows"),
        ({"prefill": (PrefillSize(8192),)}, SpecError, r"no prefill of 8192 tokens fits max_model_len 5120"),
    ],
)
def test_what_npus_cannot_have_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        planning.plan(Options(BIG, **options))


def test_a_directory_of_any_name_has_the_recipe_and_the_deployments_of_its_model(tmp_path):
    """Directories of a hub's snapshots are named by a hash."""
    directory = tmp_path / "8f0a61b3c2"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(PRESETS["qwen3-32b"])))
    own = {"target": "ascend-a3", "mesh": "tp=2", "backend": "null", "quantization": "w8a8"}
    planned = planning.plan(Options(str(directory), **own))
    expected = planning.plan(Options("qwen3-32b", **own))
    assert planned.model.config == expected.model.config
    settings = QuantizeSettings("w8a8")
    recipe = _formats(registry.find(directory), settings, tiny.QUIET)
    assert recipe == _formats(registry.find("qwen3-32b"), settings, tiny.QUIET) == formats_of_scheme("w8a8", "qwen3-32b")
    row = next(row for row in deployments.deployments().values() if row.model == "qwen3-32b")
    placed, published = (planning.plan(Options(model, deployment=row.id)) for model in (str(directory), "qwen3-32b"))
    assert (placed.deployment, placed.mesh, placed.target) == (row.id, published.mesh, published.target)


def test_experts_answer_in_int8_and_parts_travel_together_as_asked():
    """By default rows come back as floats, two parts at once; one with a single stream."""

    def asked(**options):
        plan = planning.plan(Options("qwen3.5-397b", **options))
        variant = plan.model.config.variant
        assert tiny.options_of(plan.arguments).expert_combine_dtype == options.get("expert_combine_dtype", "auto")
        return variant.in_flight, variant.formats.sent_back, Formats.of_fields(variant.formats.as_fields()) == variant.formats

    assert asked() == asked(backend="aclgraph") == (2, "float", True)
    assert asked(no_overlap=True) == (1, "float", True)
    assert asked(expert_combine_dtype="int8") == (2, "int8", True)
