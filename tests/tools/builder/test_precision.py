"""tools/builder/precision.py: types of numbers, of the cache and of log probabilities, and where weights are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import modelslim, tiny

from npucompile.graphs.errors import CheckpointError, SpecError
from npucompile.lowering import isa
from npucompile.models.quant.formats import Formats
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder import precision
from npucompile.tools.builder.plan import Options
from npucompile.tools.builder.precision import choose_kv_cache

C8 = modelslim.FIXTURES / "dense_w8a8c8"
NAMED = (("model.layers.5.self_attn.indexer", "int8"),)
STATIC = (("model.layers.*.self_attn", "int8_static"),)


@pytest.mark.parametrize(
    ("requested", "found", "chosen"),
    [
        ("auto", (), ()),
        ("auto", STATIC, STATIC),
        ("bfloat16", STATIC, ()),
        ("int8", (), (("?*", "int8"),)),
        ("int8", STATIC, (*STATIC, ("?*", "int8"))),
        ("int8", NAMED, (*NAMED, ("*.indexer", "float"), ("?*", "int8"))),
        ("auto", NAMED, NAMED),
        ("int8-indexer", NAMED, NAMED),
        ("int8-indexer", (), (("*.indexer", "int8"),)),
        ("bfloat16", NAMED, ()),
    ],
)
def test_scales_of_the_checkpoint_come_first(
    requested: str, found: tuple[tuple[str, str], ...], chosen: tuple[tuple[str, str], ...]
) -> None:
    formats = choose_kv_cache(requested, Formats(kv_cache=found), torch.bfloat16)
    assert formats.kv_cache == chosen
    assert formats.of_cache("") == "float", "a draft head's layer has no name, and caches floats"
    assert Formats.of_fields(formats.as_fields()) == formats


def cache(plan: planning.Plan) -> dict[str, torch.dtype]:
    pools = plan.model.state(plan.limits, plan.dtype)["layers"][-1]
    return {name: aval.dtype for name, aval in pools.items()}


def test_plans_have_the_pools_that_are_chosen() -> None:
    static = planning.plan(Options(str(C8), backend="null"))
    assert cache(static) == {"k": torch.int8, "v": torch.int8}
    assert "keys and values are cached as int8, scales of the checkpoint, one a head's channel" in static.notes
    assert cache(planning.plan(Options(str(C8), backend="null", dtype="bfloat16", kv_cache_dtype="bfloat16"))) == dict.fromkeys(
        "kv", torch.bfloat16
    )
    dynamic = planning.plan(Options("qwen3.5-tiny", backend="null", kv_cache_dtype="int8"))
    assert cache(dynamic) == {"k": torch.int8, "v": torch.int8, "k_scale": torch.float32, "v_scale": torch.float32}
    assert dynamic.arguments[dynamic.arguments.index("--kv-cache-dtype") + 1] == "int8"


GLM = {"model": "glm-5.2", "target": "ascend-a3", "mesh": "dp=2,tp=8", "quantization": "w8a8", "max_model_len": 8192}


@pytest.mark.parametrize(("requested", "latents"), [("int8", torch.int8), ("int8-indexer", torch.bfloat16)])
def test_layers_behind_an_indexer_cache_latents_like_the_others(requested: str, latents: torch.dtype) -> None:
    plan = planning.plan(Options(**GLM, backend="null", kv_cache_dtype=requested))
    assert ("latents are cached as int8" in " ".join(plan.notes)) == (requested == "int8")
    assert "keys of indexers are cached as int8, one scale a token" in " ".join(plan.notes)
    pools = plan.model.state(plan.limits, plan.dtype)
    for pool in (pools["layers"][0], pools["layers"][3], pools["mtp"]):
        assert pool["packed" if requested == "int8" else "latent"].dtype == latents
    assert cache(plan).keys() == ({"packed"} if requested == "int8" else {"latent", "rotary"}), "the last layer is a shared one"
    assert {pools["layers"][0][name].dtype for name in ("index", "index_scale")} == {torch.int8, torch.float16}


def test_a_deployment_caches_as_its_launch_does() -> None:
    options = Options("glm-5.2", deployment="glm52-a3x16-mix-3.5k-1.5k-50ms", backend="null")
    plan = planning.plan(options)
    assert plan.model.config.variant.formats.kv_cache == (("*.indexer", "int8"),)
    assert planning.plan(replace(options, kv_cache_dtype="bfloat16")).model.config.variant.formats.kv_cache == ()


def test_twice_the_tokens_are_cached() -> None:
    """A deployment whose pool fills what memory is left: 132 bytes a token and head of 128 channels for 256."""
    options = Options("qwen3-30b-a3b", deployment="qwen3-30b-a3x1-mix-3.5k-1.5k-50ms")
    floats, integers = (planning.plan(Options(options.model, deployment=options.deployment, kv_cache_dtype=d)) for d in ("auto", "int8"))
    pages = [plan.limits.num_pages - 1 for plan in (floats, integers)]
    full = 192 * 5120 // 128
    assert pages[0] < full
    assert pages[1] == min(full, pages[1])
    assert pages[1] >= min(full, int(pages[0] * 1.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "qwen3.5-tiny", "dtype": "float32", "kv_cache_dtype": "bfloat16"}, "computes in torch.float32 and caches no others"),
        (
            {"model": "deepseek-r1", "target": "ascend-a3", "mesh": "tp=16", "kv_cache_dtype": "int8"},
            "caches no keys and values of heads but latents, .* and that over keys that an indexer chooses does; legal are auto, bfloat16",
        ),
        ({"model": "deepseek-v3.2", "target": "ascend-a3", "mesh": "tp=8", "prefill_cp": 4}, "mesh tp=8; legal are 1 and 8, all ranks"),
        ({"model": "deepseek-r1", "target": "ascend-a3", "mesh": "tp=16", "kv_cache_dtype": "int8-indexer"}, "deepseek-r1 has no indexer"),
    ],
)
def test_what_has_no_operator_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planning.plan(Options(**options, backend="null"))


def test_ranks_that_share_prompts_have_all_heads_and_one_copy_of_keys() -> None:
    place = {"target": "ascend-a3", "mesh": "tp=8", "backend": "null"}
    shared, split = (planning.plan(Options("qwen3-32b", prefill_cp=count, **place)) for count in (8, None))
    assert shared.model.config.variant.sliced
    assert not split.model.config.variant.sliced
    assert shared.rules(shared.buckets[0]).num_shards("q_heads", shared.mesh) == 1
    assert split.rules().num_shards("q_heads", split.mesh) == 8
    assert shared.state_bytes > 7.9 * split.state_bytes
    # Requests are not shared: a decode step has none of the chunks that slices are of.
    *_, decode = shared.buckets
    assert [shared.rules(bucket).num_shards("slices", shared.mesh) for bucket in (shared.buckets[0], decode)] == [8, 1]
    assert "--prefill-cp" in shared.arguments
    assert "--prefill-cp" not in split.arguments
    # As many copies as ranks need of their own, where heads are split.
    wide = {**place, "mesh": "tp=16"}
    assert [planning.plan(Options("qwen3-32b", prefill_cp=n, **wide)).model.config.variant.kv_repeat for n in (16, 1)] == [1, 2]


def test_a_published_deployment_shares_prompts_as_it_says() -> None:
    row = "dsv32-a3x32-pd-64k-1k-30ms"
    prefill, decode = (planning.plan(Options("deepseek-v3.2", deployment=row, phase=phase)) for phase in ("prefill", "decode"))
    assert prefill.model.config.variant.sliced
    assert not decode.model.config.variant.sliced
    assert dict(prefill.decided_by)["prefill-cp"] == "row"


@pytest.mark.parametrize(
    ("level", "dtype", "why"),
    [
        ("amx", torch.bfloat16, "this CPU multiplies it in hardware"),
        ("avx512_bf16", torch.bfloat16, "this CPU multiplies it in hardware"),
        ("avx512", torch.bfloat16, "half of float32's bytes"),
        ("avx2", torch.bfloat16, "half of float32's bytes"),
        (None, torch.float32, "was never measured"),
    ],
)
def test_auto_takes_the_dtype_that_reads_less(monkeypatch, tiny_checkpoint, level, dtype, why):
    monkeypatch.setattr(isa, "in_use", lambda: level)
    plan = tiny.planned(tiny_checkpoint, dtype="auto")
    assert plan.dtype == dtype
    assert any(note.startswith(f"dtype {str(dtype).removeprefix('torch.')}: ") and why in note for note in plan.notes)
    asked = tiny.planned(tiny_checkpoint, dtype="float32")
    assert (asked.dtype, [note for note in asked.notes if note.startswith("dtype")]) == (torch.float32, [])


@pytest.mark.parametrize(
    ("stored", "dtype", "said"),
    [
        (torch.float16, "bfloat16", "the checkpoint's float16 weights are rounded to bfloat16; --dtype float32 keeps them"),
        (torch.float32, "bfloat16", "the checkpoint's float32 weights are rounded to bfloat16; --dtype float32 keeps them"),
        (torch.float16, "float32", None),
        (torch.bfloat16, "bfloat16", None),
    ],
)
def test_a_build_says_that_it_rounds_weights(tmp_path, stored, dtype, said):
    model = tiny.write_checkpoint(tmp_path / "model", tokenizer=False)
    (file,) = model.glob("*.safetensors")
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file)
    notes = [note for note in tiny.planned(model, dtype=dtype).notes if "rounded" in note]
    assert notes == ([said] if said else [])


def test_log_probabilities_of_no_more_tokens_than_there_are(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "few", vocab_size=12, tokenizer=False, eos_token_id=1)
    assert tiny.planned(model).max_logprobs == 12
    assert tiny.planned(model, max_logprobs=5).max_logprobs == 5
    with pytest.raises(SpecError, match=r"max_logprobs is 13; legal for few are 0 to 12"):
        tiny.planned(model, max_logprobs=13)


def test_small_checkpoints_are_stored_and_large_ones_bound(model, monkeypatch):
    bytes_on_disk = (model / "model.safetensors").stat().st_size
    small = tiny.planned_device(model)
    assert small.weights == "stored"
    assert any("GB are copied into the artifact (--weights bound to read" in note for note in small.notes)
    monkeypatch.setattr(precision, "STORED_BYTES", bytes_on_disk // 2)
    large = tiny.planned_device(model)
    assert large.weights == "bound"
    assert any(f"GB stay in {model}, which serving reads (--weights stored to copy them)" in note for note in large.notes)
    for choice in ("stored", "bound"):
        asked = tiny.planned_device(model, weights=choice)
        assert asked.weights == choice
        assert not any("--weights" in note for note in asked.notes)
        assert asked.arguments[asked.arguments.index("--weights") + 1] == choice


def test_here_they_are_always_stored(model):
    for choice in (None, "auto", "stored"):
        here = tiny.planned(model, weights=choice)
        assert (here.weights, "--weights" in here.arguments) == ("stored", False)
    with pytest.raises(SpecError, match=r"--weights bound for cpu: .* legal is stored"):
        tiny.planned(model, weights="bound")


def test_what_has_no_weights_has_no_choice(model, tmp_path):
    preset = planning.plan(Options("qwen3.5-27b", target="ascend-a3", mesh="tp=2"))
    assert (preset.weights, "--weights" in preset.arguments) == ("none", False)
    for choice in ("stored", "bound"):
        with pytest.raises(SpecError, match=rf"--weights {choice}: qwen3\.5-27b has no weights; legal is a path"):
            planning.plan(Options("qwen3.5-27b", target="ascend-a3", mesh="tp=2", weights=choice))
    assert tiny.planned_device(model, backend="null").weights == "none"
    sizes = tmp_path / "sizes"
    sizes.mkdir()
    (sizes / "config.json").write_text(json.dumps({**tiny.CONFIG, **tiny.NPU_SIZES}))
    alone = tiny.planned_device(sizes)
    assert alone.weights == "none"
    assert any(f"no weights: {sizes} holds none of model.safetensors" in note for note in alone.notes)


def test_an_unreadable_checkpoint_is_refused_when_it_is_planned(model, tmp_path):
    broken = tiny.copied(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        tiny.planned_device(broken)
