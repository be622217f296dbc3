"""tools/quantize/driver.py: what is written loads as the floats do when they are quantised on loading, and nothing is left of a failure."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import fp8, quantised, tiny
from support.tiny import QUIET

from npucompile.graphs.errors import CheckpointError, NpucompileError, SpecError
from npucompile.models import checkpoint, registry, safetensors_files
from npucompile.models.quant.description import DESCRIPTION, formats_in
from npucompile.models.quant.formats import Formats
from npucompile.tools.progress import Progress
from npucompile.tools.quantize import driver
from npucompile.tools.quantize.driver import QuantizeSettings, quantize
from npucompile.tools.quantize.forward import in_formats, loaded, logits
from npucompile.tools.quantize.layout import Activations
from npucompile.tools.quantize.matrices import formats_for, select

INT4 = Formats(
    (("mtp.*", "float"), ("*.self_attn.?_proj", "w8a8_dynamic"), ("*.mlp.experts.*", "w4a8_dynamic"), ("*.mlp.*_proj", "w4a8_dynamic"))
)
"""int4 in every feed-forward, which no published recipe gives to dense models."""


MIXED = Formats((("*.q_proj", "float"), ("*.layers.1.*.up_proj", "float"), *formats_for("w8a8", "any").rules))


@pytest.mark.parametrize("kind", ["moe", "dense", "plain"])
@pytest.mark.parametrize(
    ("scheme", "group"),
    [
        ("w8a8", 0),
        ("w8a8-all", 0),
        ("w4a8", 0),
        ("w4a8", 8),
        ("w4a8-all", 0),
        ("int4", 0),
        ("int4", 4),
        ("mixed", 0),
        ("w4a16", 0),
        ("w4a16", 8),
    ],
)
def test_it_loads_as_the_floats_do_quantised_on_loading(tmp_path, monkeypatch, kind, scheme, group):
    source = quantised.write(tmp_path / "float", kind)
    if scheme in ("int4", "mixed"):
        formats = replace(INT4, group=group) if scheme == "int4" else MIXED
        monkeypatch.setattr(driver, "formats_for", lambda *_, **__: formats)
    else:
        formats = formats_for(scheme, source.name, group=group)
    written = quantised.quantised(source, tmp_path / "out", {"int4": "w4a8", "mixed": "w8a8"}.get(scheme, scheme), group=group)
    found = formats_in(tmp_path / "out")
    assert found is not None
    assert found.stored
    drafting = kind == "moe"
    for ranks in (1, 2):
        wanted = quantised.leaves(source, formats, drafting=drafting, ranks=ranks)
        stored = quantised.leaves(written, found, drafting=drafting, ranks=ranks)
        assert list(stored) == list(wanted)
        for path, tensor in wanted.items():
            assert stored[path].dtype == tensor.dtype, path
            assert torch.equal(stored[path], tensor), path
        integers = {tensor.dtype for tensor in wanted.values()} & {torch.int8, torch.int32}
        if scheme == "w4a16":
            assert integers == {torch.int32}
            continue
        int4 = scheme == "int4" or (scheme in ("w4a8", "w4a8-all") and kind == "moe")
        assert integers == ({torch.int8, torch.int32} if int4 else {torch.int8})
    tokens = torch.arange(1, 41, dtype=torch.int32)[None]
    results = [logits(*loaded(each, torch.float32, form), tokens, torch.float32) for each, form in ((source, formats), (written, None))]
    assert torch.equal(*results)
    plain = logits(*loaded(source, torch.float32), tokens, torch.float32)
    assert 1e-6 < float((results[0] - plain).square().mean().sqrt() / plain.std()) < 0.5


def test_a_head_that_shares_the_embedding_gets_integers_of_its_own(tmp_path):
    """On loading and ahead of time; the embedding stays float. `--keep` leaves them one tensor."""
    source = quantised.write(tmp_path / "float", "tied")
    written, formats = quantised.quantised(source, tmp_path / "out", "w8a8-all"), formats_for("w8a8-all", source.name)
    assert [json.loads(each.text)["tie_word_embeddings"] for each in (source, written)] == [True, False]
    wanted, found = quantised.leaves(source, formats), quantised.leaves(written, formats_in(tmp_path / "out"))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[path], tensor) for path, tensor in wanted.items())
    embedding = load_file(tmp_path / "float" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(wanted["embed"], embedding.float())
    integers, scale = wanted["head.weight"], wanted["head.scale"]
    assert integers.dtype == torch.int8
    assert ((integers.t() * scale[:, None] - embedding).abs() <= 0.501 * scale[:, None]).all()
    kept = quantised.quantised(source, tmp_path / "kept", "w8a8-all", keep=("lm_head",))
    assert json.loads(kept.text)["tie_word_embeddings"] is True
    assert "head.weight" not in quantised.leaves(kept, formats_in(tmp_path / "kept"))


MODELSLIM = Path(__file__).with_name("modelslim")
"""A random model and what ModelSlim 26.1.0 wrote of it: static attention, int4 experts in layer 0, int8 in layer 1."""


FP8_SCHEMES = {
    "w8a8": ("deepseek-r1", {"scheme": "w8a8"}),
    "w4a8": ("deepseek-r1", {"scheme": "w4a8"}),
    "w4a8 in groups, float draft": ("deepseek-v3", {"scheme": "w4a8", "group": 8, "float_draft": True}),
    "w8a8 of an indexer": ("deepseek-v3.2", {"scheme": "w8a8"}),
    "w4a8 of an indexer": ("deepseek-v3.2", {"scheme": "w4a8", "keep": ("*.layers.0.mlp.*",)}),
    "any": ("some-v3", {"scheme": "w4a8"}),
    "w8a8 of a scale a channel": ("some-glm", {"scheme": "w8a8"}),
}


@pytest.mark.parametrize(("name", "settings"), FP8_SCHEMES.values(), ids=FP8_SCHEMES)
def test_fp8_becomes_what_its_floats_do(tmp_path, name, settings):
    """The draft head, a layer behind the others, included; scales lie in another file than their matrices."""
    kind = {"deepseek-v3.2": "v32", "some-glm": "glm4"}.get(name, "v3")
    made, source = fp8.write(tmp_path / name, kind), registry.find(tmp_path / name)
    options = {"progress": QUIET, "shard_bytes": 100_000}
    errors = quantize(source, tmp_path / "out", QuantizeSettings(**settings), **options)
    written, formats = registry.find(tmp_path / "out"), formats_in(tmp_path / "out")
    assert formats is not None
    # The name of a directory chooses the recipe.
    fp8.write_floats(tmp_path / "floats" / name, made, torch.float32)
    assert errors == [
        replace(error, float_bytes=error.float_bytes // 4)
        for error in quantize(registry.find(tmp_path / "floats" / name), tmp_path / "plain", QuantizeSettings(**settings), **options)
    ]
    draft = f"model.layers.{len(source.model.config.layer_kinds)}."
    assert any(error.name.startswith(draft) for error in errors) != settings.get("float_draft", False)
    assert not any(part in error.name for error in errors for part in ("kv_b_proj", "indexer", "eh_proj", "embed", "head"))
    # Quantised on loading, the FP8 checkpoint gives the same integers; what stays float is written in bfloat16.
    own, plain = in_formats(written.model, formats), replace(formats, stored=False)
    for ranks in (1, 2):
        stored = quantised.leaves(written, formats, ranks=ranks, dtype=torch.bfloat16)
        wanted = quantised.leaves(source, plain, ranks=ranks, dtype=torch.bfloat16)
        assert list(stored) == list(wanted)
        assert all(torch.equal(stored[path], tensor) for path, tensor in wanted.items())
    assert {torch.int8} | ({torch.int32} if settings["scheme"] == "w4a8" else set()) <= {tensor.dtype for tensor in stored.values()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {key: value for key, value in json.loads(source.text).items() if key != "quantization_config"}
    tensors = safetensors_files.open_checkpoint(tmp_path / "out").tensors
    assert not any(entry.dtype.startswith("F8") or entry.name.endswith("scale_inv") for entry in tensors.values())
    assert len({entry.file for entry in tensors.values()}) > 3
    described = json.loads((tmp_path / "out" / DESCRIPTION).read_text())
    assert {key for key in described if "." in key} == set(tensors)
    tokens = torch.arange(1, 33, dtype=torch.int32)[None]
    again = checkpoint.load(checkpoint.open_checkpoint(tmp_path / "out"), own.params(torch.float32))
    exact = made.random.logits(tokens[0].tolist())
    assert 1e-4 < float((logits(own, again, tokens, torch.float32)[0] - exact).square().mean().sqrt() / exact.std()) < 0.6


def test_static_scales_of_fp8_are_calibrated_and_written_for_bfloat16(tmp_path, monkeypatch):
    made, source = fp8.write(tmp_path / "deepseek-v3.2", "v32"), registry.find(tmp_path / "deepseek-v3.2")
    (tmp_path / "text").write_text("not read")
    monkeypatch.setattr(driver, "token_ids", lambda *_: torch.arange(1, 90, dtype=torch.int32))
    quantize(source, tmp_path / "out", QuantizeSettings("w8a8", calibrate=tmp_path / "text"), QUIET)
    tensors = safetensors_files.open_checkpoint(tmp_path / "out").tensors
    matrix = "model.layers.1.self_attn.o_proj"
    assert (tensors[f"{matrix}.deq_scale"].dtype, tensors[f"{matrix}.quant_bias"].dtype) == ("F32", "I32")
    # The draft head is not run, and its attention has a scale for each token.
    assert "model.layers.2.self_attn.o_proj.weight_scale" in tensors
    own, params = loaded(registry.find(tmp_path / "out"), torch.float32)
    ids = made.random.prompt(40)
    exact = made.random.logits(ids)
    found = logits(own, params, torch.tensor([ids], dtype=torch.int32), torch.float32)[0]
    assert 1e-4 < float((found - exact).square().mean().sqrt() / exact.std()) < 0.3


PACKED_EXPERTS = Path(__file__).parents[2] / "models/quant/packed_experts"


@pytest.mark.parametrize(("name", "group"), [("group", 32), ("channel", 0)])
def test_compressed_tensors_writes_the_same(tmp_path, name, group):
    """It made the fixture of the same floats: every tensor is equal, bit for bit, and so is what it reads of config.json."""
    (tmp_path / "float").mkdir()
    floats = {name: tensor.float() for name, tensor in load_file(PACKED_EXPERTS / "floats.safetensors").items()}
    save_file(floats, tmp_path / "float" / "model.safetensors")
    theirs = json.loads((PACKED_EXPERTS / name / "config.json").read_text())
    described = theirs.pop("quantization_config")
    (tmp_path / "float" / "config.json").write_text(json.dumps(theirs))
    quantized = quantised.quantised(registry.find(tmp_path / "float"), tmp_path / "out", "w4a16", group=group)
    want, got = load_file(PACKED_EXPERTS / name / "model.safetensors"), load_file(next((tmp_path / "out").glob("model-*.safetensors")))
    assert set(got) == set(want)
    for tensor in want:
        wide = want[tensor].float() if want[tensor].is_floating_point() else want[tensor]
        assert (got[tensor].dtype, torch.equal(got[tensor], wide)) == (wide.dtype, True), tensor
    ours = json.loads(quantized.text)
    written = ours.pop("quantization_config")
    assert ours == theirs
    assert {key: written[key] for key in ("quant_method", "format", "config_groups", "kv_cache_scheme")} == {
        key: value for key, value in described.items() if key != "ignore"
    }
    # Routers and the head; the embedding is no linear layer.
    left = {"lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in range(2))}
    assert set(written["ignore"]) == left
    assert formats_in(tmp_path / "out") == formats_in(PACKED_EXPERTS / name)


def test_modelslim_writes_the_same(tmp_path, monkeypatch):
    rules = (("*.self_attn.?_proj", "w8a8"), ("*.layers.0.*.experts.*", "w4a8_dynamic"), ("*.layers.1.*.experts.*", "w8a8_dynamic"))
    monkeypatch.setattr(driver, "formats_for", lambda *_, **__: Formats(rules))
    theirs = load_file(MODELSLIM / "quantised" / "quant_model_weights-00001-of-00001.safetensors")

    def activations(source, model, matrices, settings, progress):
        own = {
            m.param: [float(theirs[f"{m.stem}.{name}"]) for name in ("input_scale", "input_offset")] for m in matrices if m.form == "w8a8"
        }
        return {path: Activations(*values) for path, values in own.items()}

    # ModelSlim calibrates a layer behind those that it has rounded; the first layer's inputs are compared below.
    real = driver._activations
    monkeypatch.setattr(driver, "_activations", activations)
    source = registry.find(MODELSLIM / "float")
    quantize(source, tmp_path / "out", QuantizeSettings("w8a8", calibrate=MODELSLIM / "tokens.json"), QUIET)
    ours = load_file(tmp_path / "out" / "quant_model_weights-00001-of-00001.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    described, wanted = (json.loads((path / DESCRIPTION).read_text()) for path in (tmp_path / "out", MODELSLIM / "quantised"))
    assert described == wanted
    monkeypatch.setattr(
        driver, "token_ids", lambda *_: torch.tensor(json.loads((MODELSLIM / "tokens.json").read_text()), dtype=torch.int32)
    )
    floats = safetensors_files.open_checkpoint(MODELSLIM / "float")
    matrices = [m for m in select(source.model, floats, Formats(rules)) if m.stem.startswith("model.layers.0.self_attn.q")]
    (found,) = real(source, source.model, matrices, QuantizeSettings("w8a8", calibrate=MODELSLIM / "tokens.json"), QUIET).values()
    (first,) = activations(source, None, matrices, None, None).values()
    assert found == first


def test_the_description_names_every_tensor(tmp_path):
    source = quantised.write(tmp_path / "float", "moe")
    quantised.quantised(source, tmp_path / "out", "w4a8")
    described = json.loads((tmp_path / "out" / DESCRIPTION).read_text())
    index = json.loads((tmp_path / "out" / "quant_model_weights.safetensors.index.json").read_text())
    assert {name for name in described if "." in name} == set(index["weight_map"])
    settings = {name: value for name, value in described.items() if "." not in name}
    assert settings == {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "metadata": {}, "group_size": 0, "optional": {}}
    expert = "model.layers.1.mlp.experts.3"
    tensors = load_file(tmp_path / "out" / index["weight_map"][f"{expert}.down_proj.weight"])
    shapes = {name.removeprefix(f"{expert}."): list(t.shape) for name, t in tensors.items() if name.startswith(f"{expert}.")}
    # [M, F] is [32, 16], [F, M] is [16, 32]; two rows share a byte.
    assert {name: shapes[f"down_proj.{name}"] for name in ("weight", "weight_scale", "weight_offset", "scale_bias")} == {
        "weight": [16, 16], "weight_scale": [32, 1], "weight_offset": [32, 1], "scale_bias": [32, 16],
    }  # fmt: skip
    assert (shapes["gate_proj.weight"], shapes["gate_proj.scale_bias"]) == ([8, 32], [16, 1])
    assert described[f"{expert}.up_proj.scale_bias"] == "W4A8_DYNAMIC"
    floats = load_file(tmp_path / "float" / "model.safetensors")
    copied = [name for name, kind in described.items() if kind == "FLOAT"]
    assert any(name.startswith("mtp.layers.0.mlp.experts") for name in copied), "the draft head stays float"
    assert all(torch.equal(tensors[name], floats[name]) for name in copied)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "float" / "tokenizer.json").read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o777 == (tmp_path / "float").stat().st_mode & 0o777


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_draft_head_that_the_checkpoint_lacks_is_not_declared_by_what_is_written(tmp_path, scheme):
    source, said = quantised.write(tmp_path / "float", "moe"), io.StringIO()
    tensors = {name: tensor for name, tensor in load_file(tmp_path / "float" / "model.safetensors").items() if not name.startswith("mtp.")}
    save_file(tensors, tmp_path / "float" / "model.safetensors")
    quantize(source, tmp_path / "out", QuantizeSettings(scheme, group=0), Progress(stream=said))
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("float", "out"))
    assert (before["mtp_num_hidden_layers"], after["mtp_num_hidden_layers"]) == (1, 0)
    assert "no draft head: the checkpoint has no tensor of the one that its configuration declares" in said.getvalue()
    assert tiny.planned(tmp_path / "out").limits.drafts == 0


def test_experts_may_be_stored_one_by_one_and_files_be_many(tmp_path):
    """A matrix is in memory at a time, and the result depends neither on how experts are stored nor on the size of files."""
    source = quantised.write(tmp_path / "float", "moe")
    apart = tmp_path / "apart"
    tiny.copied(tmp_path / "float", apart)
    tensors = load_file(apart / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        fused, prefix = tensors.pop(name), name.rpartition(".")[0]
        for expert, matrix in enumerate(fused):
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{expert}.{part}.weight"] = rows.contiguous()
    save_file(tensors, apart / "model.safetensors")
    errors = quantize(source, tmp_path / "one", QuantizeSettings("w4a8"), QUIET)
    assert errors == quantize(registry.find(apart), tmp_path / "two", QuantizeSettings("w4a8"), QUIET, shard_bytes=20_000)
    one, two = ({n: e for n, e in safetensors_files.open_checkpoint(tmp_path / each).tensors.items()} for each in ("one", "two"))
    assert len({entry.file for entry in one.values()}) == 1
    assert len({entry.file for entry in two.values()}) > 3
    trunk = [name for name in one if not name.startswith("mtp.")]
    assert set(trunk) == {name for name in two if not name.startswith("mtp.")}
    assert all(torch.equal(one[name].read(), two[name].read()) for name in trunk)


def test_one_matrix_is_read_at_a_time(tmp_path, monkeypatch):
    source = quantised.write(tmp_path / "float", "moe")
    read, original = [], safetensors_files.TensorEntry.read_slice
    monkeypatch.setattr(safetensors_files.TensorEntry, "read_slice", lambda *args: read.append(out := original(*args)) or out)
    quantize(source, tmp_path / "out", QuantizeSettings("w8a8"), QUIET)
    config = source.model.config
    assert max(tensor.nbytes for tensor in read if tensor.dim() == 3) == 4 * config.hidden_size * config.moe_intermediate_size


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("moe", {"keep": ("*.no_proj",)}, r"no matrix is named '\*\.no_proj'; legal are patterns of names such as model\.layers\.0\."),
        ("moe", {"group": 8}, "--group 8 with --scheme w8a8: int4 matrices have groups; legal are --scheme w4a8 and w4a16"),
        ("moe", {"scheme": "w4a8", "group": 12}, "has a contraction of 32, which groups of 12 do not fill; legal are divisors of 32"),
        ("moe", {"scheme": "w4a16"}, "has a contraction of 32, which groups of 128 do not fill; legal are divisors of 32"),
        ("moe", {"scheme": "w4a16", "static": ("*.o_proj",)}, "its activations stay what they are; legal are --scheme w8a8 and w4a8"),
        ("moe", {"keep": ("*",)}, "--scheme w8a8 leaves every matrix of float float"),
        (
            "moe",
            {"static": ("*.self_attn.?_proj",)},
            "one scale for all tokens needs a text to find it with; legal is --calibrate TEXT too",
        ),
        ("moe", {"static": ("*.experts.*",), "calibrate": "text"}, "experts have a scale for each token, legal is w8a8_dynamic"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(tmp_path, kind, settings, message):
    source = quantised.write(tmp_path / "float", kind)
    (tmp_path / "text").write_text("some text")
    settings = {"scheme": "w8a8", **settings}
    if "calibrate" in settings:
        settings["calibrate"] = tmp_path / "text"
    with pytest.raises(NpucompileError, match=message):
        quantize(source, tmp_path / "out", QuantizeSettings(**settings), QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "text"]


def test_checkpoints_that_are_no_floats_are_refused(tmp_path):
    source = quantised.write(tmp_path / "float", "dense")
    written = quantised.quantised(source, tmp_path / "out", "w8a8")
    with pytest.raises(CheckpointError, match=f"out is quantised already: it holds {DESCRIPTION}"):
        quantize(written, tmp_path / "again", QuantizeSettings("w8a8"), QUIET)
    packed = quantised.quantised(source, tmp_path / "packed", "w4a16", group=0)
    with pytest.raises(CheckpointError, match=r"is quantised already: config\.json has quantization_config of quant_method 'compressed-"):
        quantize(packed, tmp_path / "again", QuantizeSettings("w8a8"), QUIET)
    for config, message in (
        ({"quant_method": "awq"}, "quant_method is 'awq'; legal are compressed-tensors, fp8"),
        ({"quant_method": "fp8"}, "activation_scheme is None; legal is 'dynamic' or 'static'"),
    ):
        (tmp_path / "float" / "config.json").write_text(json.dumps(json.loads(source.text) | {"quantization_config": config}))
        with pytest.raises(CheckpointError, match=message):
            quantize(registry.find(tmp_path / "float"), tmp_path / "again", QuantizeSettings("w8a8"), QUIET)
    (tmp_path / "float" / "config.json").write_text(source.text)
    with pytest.raises(SpecError, match=r"--float-draft: plain has no draft head in its checkpoint"):
        quantize(quantised.write(tmp_path / "plain", "plain"), tmp_path / "again", QuantizeSettings("w8a8", float_draft=True), QUIET)
    with pytest.raises(SpecError, match=r"qwen3\.5-27b is a set of sizes without weights"):
        quantize(registry.find("qwen3.5-27b"), tmp_path / "again", QuantizeSettings("w8a8"), QUIET)
    with pytest.raises(SpecError, match="out exists; legal is a new or empty directory"):
        quantize(source, tmp_path / "out", QuantizeSettings("w8a8"), QUIET)
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "float" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight \(expected \[32\]\) is missing"):
        quantize(source, tmp_path / "again", QuantizeSettings("w8a8"), QUIET)
    assert not (tmp_path / "again").exists()


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    source, finished = quantised.write(tmp_path / "float", "dense"), []

    def failing(*args, **options):
        finished.append(1)
        if len(finished) == 5:
            raise OSError(28, "No space left on device", "there")
        return real(*args, **options)

    real = driver.rounded
    monkeypatch.setattr(driver, "rounded", failing)
    with pytest.raises(OSError, match="No space left"):
        quantize(source, tmp_path / "out", QuantizeSettings("w8a8"), QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["float"]
