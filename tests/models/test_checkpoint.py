"""models/checkpoint.py: every published layout loads as in transformers, what is saved loads again, and refusals name the tensor."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError
from npucompile.graphs.types import Aval
from npucompile.models import checkpoint, registry
from npucompile.models.params import Param, Source, initialise
from npucompile.models.quant.formats import Formats
from npucompile.models.safetensors_files import TensorEntry
from npucompile.models.variant import Variant

CASES = ["dense", "dense-tied", "moe", "moe-tied", "next", "plain-tied", "plain-moe", "plain-moe-some-dense"]
JOINS = {"a": lambda w: 2 * w, "b": lambda w: w + 1}


def write(directory, tensors, files: int = 1):
    """Tensors as one file, or as shards with an index."""
    directory.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    placed = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name, at in placed.items() if at == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return directory


def state_dict(random):
    """The module's tensors by name; the head of a tied model is the embedding and is not on disk."""
    tensors = dict(random.theirs.state_dict())
    if random.model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def wrapped(name):
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def load(directory, random):
    params = random.model.family.abstract_params(random.model.config, torch.float32)
    return checkpoint.load(checkpoint.open_checkpoint(directory), params)


def assert_equal(ours, random):
    for (path, tensor), (_, expected) in zip(tree.flatten(ours), tree.flatten(random.weights), strict=True):
        assert tensor.dtype == expected.dtype, path
        assert torch.equal(tensor, expected), path


def no_head(random):
    return {"mtp_num_hidden_layers": 0} if "next" in random.model.family.name else {}


@pytest.mark.parametrize("name", CASES)
def test_files_of_save_pretrained_load(tmp_path, name):
    """They have a tensor for each expert, and no tied head."""
    random = oracle.case(name)
    random.theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in stored_name for stored_name in stored) == bool(random.model.config.num_experts)
    assert_equal(load(tmp_path, random), random)
    source = registry.find(tmp_path)
    # Files without the field have a draft head in some families, which transformers does not write.
    assert replace(source.model.config, **no_head(random)) == random.model.config
    assert not source.has_draft_head


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_loads(tmp_path, name):
    """It has fused experts, as the published files have."""
    random = oracle.case(name)
    assert_equal(load(write(tmp_path / "fused", state_dict(random)), random), random)


@pytest.mark.parametrize("name", ["dense", "moe", "moe-tied"])
def test_the_multimodal_layout_in_shards_loads(tmp_path, name):
    """Names with language_model, vision and draft tensors beside them, and three shards, as published."""
    random = oracle.case(name)
    tensors = {wrapped(name): tensor for name, tensor in state_dict(random).items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 3, dtype=torch.int8)
    tensors["mtp.layers.0.mlp.gate.weight"] = torch.ones(3)
    tensors["mtp.fc.weight"] = torch.ones(2)
    assert_equal(load(write(tmp_path / "wrapped", tensors, 3), random), random)


def test_the_draft_head_is_loaded_when_it_is_asked_for(tmp_path):
    model = registry.from_config("x", {**oracle.case("moe").values, "mtp_num_hidden_layers": 1})
    params = model.family.abstract_params(model.config, torch.float32)
    drawn = initialise(params, torch.Generator().manual_seed(3))
    checkpoint.save(params, drawn, tmp_path)
    loaded = checkpoint.load(checkpoint.open_checkpoint(tmp_path), params)
    assert "mtp" in loaded
    for (path, a), (_, b) in zip(tree.flatten(loaded), tree.flatten(drawn), strict=True):
        assert torch.equal(a, b), path
    assert "mtp" not in checkpoint.load(checkpoint.open_checkpoint(tmp_path), model.params(torch.float32))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_in_the_parameters_dtype(tmp_path, stored, dtype):
    random = oracle.case("moe")
    write(tmp_path / "x", {name: tensor.to(stored) for name, tensor in state_dict(random).items()})
    params = random.model.family.abstract_params(random.model.config, dtype)
    loaded = checkpoint.load(checkpoint.open_checkpoint(tmp_path / "x"), params)
    for (path, param), (_, ours), (_, exact) in zip(tree.flatten(params), tree.flatten(loaded), tree.flatten(random.weights), strict=True):
        assert ours.dtype == param.aval.dtype == (torch.float32 if path.endswith(("a_log", "dt_bias")) else dtype)
        assert torch.equal(ours, exact.to(stored).to(ours.dtype)), path


@pytest.mark.parametrize("per_expert", [False, True])
def test_each_tensor_is_read_once_and_into_memory_of_its_own(tmp_path, monkeypatch, per_expert):
    random, names = oracle.case("moe"), []
    if per_expert:
        random.theirs.save_pretrained(tmp_path)
    else:
        write(tmp_path, {**state_dict(random), "model.visual.x": torch.ones(100)}, 2)
    read_into = TensorEntry.read_into
    monkeypatch.setattr(TensorEntry, "read_into", lambda entry, *place: names.append(entry.name) or read_into(entry, *place))
    loaded = load(tmp_path, random)
    stored = set(checkpoint.open_checkpoint(tmp_path).tensors)
    assert sorted(names) == sorted(stored - {"model.visual.x"})
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")
    assert_equal(loaded, random)
    assert all(tensor.is_contiguous() for _, tensor in tree.flatten(loaded))


def test_parameters_of_the_same_tensors_are_one_group(tmp_path):
    params = {name: Param(Aval((2,), torch.float32), Source(("w",), ((2,),), join)) for name, join in JOINS.items()}
    params["other"] = Param(Aval((1,), torch.bfloat16), Source(("v",), ((1,),)))
    save_file({"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([3.0])}, tmp_path / "model.safetensors")
    reader = checkpoint.ParamReader(checkpoint.open_checkpoint(tmp_path), params)
    paths = [path for path, _ in tree.flatten(params)]
    assert [[paths[position] for position in group] for group in reader.groups] == [["a", "b"], ["other"]]
    loaded = {paths[position]: tensor.tolist() for group in reader.groups for position, tensor in reader.read(group)}
    assert loaded == {"a": [2.0, 4.0], "b": [2.0, 3.0], "other": [3.0]}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_reads_what_save_wrote(tmp_path, name):
    """It finds no missing and no unexpected tensor and gives the same logits; our loader reads the file too."""
    random = oracle.case(name)
    params = random.model.family.abstract_params(random.model.config, torch.float32)
    path = checkpoint.save(params, random.weights, tmp_path)
    assert path == tmp_path / "model.safetensors"
    random.theirs.config.save_pretrained(tmp_path)
    theirs, report = type(random.theirs).from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = random.prompt(12)
    assert (theirs.eval()(torch.tensor([ids])).logits[0] - random.logits(ids)).abs().max() < 1e-5
    assert_equal(load(tmp_path, random), random)


def test_save_is_deterministic_and_replaces_in_one_step(tmp_path):
    random = oracle.case("moe")
    params = random.model.family.abstract_params(random.model.config, torch.float32)
    first = checkpoint.save(params, random.weights, tmp_path / "new" / "place").read_bytes()
    second = checkpoint.save(params, tree.map_leaves(torch.clone, random.weights), tmp_path / "new" / "place").read_bytes()
    assert first == second
    assert [p.name for p in (tmp_path / "new" / "place").iterdir()] == ["model.safetensors"]
    broken = {**random.weights, "norm": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"norm: is \[3\]; its parameter is \[44\]"):
        checkpoint.save(params, broken, tmp_path / "new" / "place")
    assert (tmp_path / "new" / "place" / "model.safetensors").read_bytes() == first


def test_save_takes_tensors_that_require_gradients(tmp_path):
    params = {"w": Param(Aval((2, 3), torch.float32), Source(("w.weight",), ((2, 3),)))}
    checkpoint.save(params, {"w": torch.ones(2, 3, requires_grad=True)}, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w.weight"], torch.ones(2, 3))


# --- refusals ---


def refusal(directory, random) -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory, random)
    message = str(error.value)
    assert message.startswith(str(directory))
    return message


def test_missing_tensors_are_named_with_what_was_expected(tmp_path):
    random = oracle.case("moe")
    tensors = state_dict(random)
    del tensors["model.layers.1.mlp.gate.weight"]
    message = refusal(write(tmp_path / "one", tensors), random)
    assert message.endswith("tensor model.layers.1.mlp.gate.weight (expected [5, 44]) is missing")
    message = refusal(write(tmp_path / "few", {name: t for name, t in tensors.items() if "layers" not in name}), random)
    assert re.search(r"tensor model\.layers\.\d\.\S+ \(expected \[.*\]\) is missing; so with \d+ more: ", message)
    assert message.count("(expected") == 6


def test_one_expert_too_many_is_named(tmp_path):
    random = oracle.case("moe")
    random.theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"] = torch.zeros(20, 44)
    write(tmp_path, tensors)
    assert refusal(tmp_path, random).endswith("tensor model.layers.2.mlp.experts.5.up_proj.weight is not part of the model")


@pytest.mark.parametrize(
    "name, tensor, shape",
    [
        ("dense", "model.norm.weight", (45,)),
        ("dense", "model.layers.0.linear_attn.conv1d.weight", (80, 4)),
        ("dense", "model.layers.3.self_attn.q_proj.weight", (44, 108)),
        ("moe", "model.layers.0.mlp.experts.gate_up_proj", (5, 44, 40)),
        ("moe", "model.layers.0.mlp.experts.down_proj", (4, 44, 20)),
    ],
)
def test_a_wrong_shape_is_named_with_both(tmp_path, name, tensor, shape):
    random = oracle.case(name)
    tensors = state_dict(random)
    expected = list(tensors[tensor].shape)
    tensors[tensor] = torch.zeros(shape)
    message = refusal(write(tmp_path / "x", tensors), random)
    assert message.endswith(f"tensor {tensor} (found {list(shape)}, expected {expected}) has a wrong shape")


def test_a_tensor_of_a_layer_that_no_parameter_reads_is_named(tmp_path):
    """Dropping a bias silently would give a wrong model."""
    random = oracle.case("dense")
    tensors = {**state_dict(random), "model.layers.3.self_attn.q_proj.bias": torch.ones(108)}
    message = refusal(write(tmp_path / "x", tensors), random)
    assert message.endswith("tensor model.layers.3.self_attn.q_proj.bias has values up to 1 and is not read; legal are zeros only")


@pytest.mark.parametrize("dtype, code", [(torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2"), (torch.uint8, "U8"), (torch.int32, "I32")])
def test_quantised_tensors_are_refused_by_name(tmp_path, dtype, code):
    """The message names the quantised tensor, not the scales beside it."""
    random = oracle.case("dense")
    tensors = state_dict(random)
    name = "model.layers.3.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    tensors[name + "_scale_inv"] = torch.ones(1)
    message = refusal(write(tmp_path / "x", tensors), random)
    assert f"tensor {name} ({code}; expected F32 or BF16 or F16 or F64) has the wrong dtype" in message


def test_one_name_twice_under_two_prefixes_is_refused(tmp_path):
    random = oracle.case("dense")
    tensors = {**state_dict(random), "model.language_model.norm.weight": torch.zeros(44)}
    message = refusal(write(tmp_path / "x", tensors), random)
    assert "are both model.norm.weight; expected one of them" in message


def test_nothing_is_read_before_everything_fits(tmp_path, monkeypatch):
    random = oracle.case("dense")
    tensors = state_dict(random)
    tensors["model.norm.weight"] = torch.zeros(3)
    monkeypatch.setattr(TensorEntry, "read_into", lambda *_: pytest.fail("read"))
    refusal(write(tmp_path / "x", tensors), random)


def test_a_float_checkpoint_has_no_static_scales_of_activations(tmp_path):
    """They are found by a calibration; a made-up scale would serve wrong tokens without a word."""
    random = oracle.case("dense")
    write(tmp_path, state_dict(random))

    def read(form):
        variant = Variant(formats=Formats((("*.mlp.*", form),)))
        model = replace(random.model, config=replace(random.model.config, variant=variant))
        return checkpoint.ParamReader(checkpoint.open_checkpoint(tmp_path), model.params(torch.float32))

    assert read("w8a8_dynamic").groups
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight, and \d+ more: .* static scales .* quantize CHECKPOINT"):
        read("w8a8")
