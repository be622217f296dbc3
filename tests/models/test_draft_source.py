"""models/draft_source.py: draft models are found and read from their own checkpoints, and one that does not fit is refused by name."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from support import eagle, modelslim, oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError, ConfigError, UnknownModel
from npucompile.models import checkpoint, draft_source, registry
from npucompile.models.presets import DRAFT_PRESETS


@pytest.fixture(scope="module")
def head():
    return eagle.head("plain")


@pytest.fixture
def written(tmp_path, head):
    """Writes both checkpoints; returns the directories of the model and of the head, whose fields and tensors the arguments change."""

    def write(fields=(), renamed=lambda name: name, **tensors):
        model, draft = tmp_path / "model", tmp_path / "draft"
        for place, values in ((model, head.random.values), (draft, {**head.values, **dict(fields)})):
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(json.dumps(values))
        state = {name: tensor.clone() for name, tensor in head.random.theirs.state_dict().items()}
        save_file(state, model / "model.safetensors")
        kept = {name: tensor for name, tensor in {**head.tensors, **tensors}.items() if tensor is not None}
        save_file({renamed(name): tensor for name, tensor in kept.items()}, draft / "model.safetensors")
        return model, draft

    return write


def load(model, draft):
    source = draft_source.with_draft_model(registry.find(model), draft)
    params = source.model.family.abstract_params(source.model.config, torch.float32)
    return source, checkpoint.load(draft_source.open_both(source.checkpoint_dir, source.draft), params)


@pytest.mark.parametrize("renamed", [str, lambda name: f"model.{name}".replace("midlayer.", "layers.0.")], ids=["EAGLE", "vLLM"])
def test_both_checkpoints_load_under_the_names_of_either_project(written, head, renamed):
    """The inverse of the map is not read; every other tensor is."""
    source, weights = load(*written(renamed=renamed))
    assert source.model.family.name == "qwen3+eagle3"
    assert (source.draft.name, source.draft.parts) == ("draft", ("d2t",))
    for (name, ours), (_, theirs) in zip(tree.flatten(weights), tree.flatten(head.random.weights), strict=True):
        assert torch.equal(ours, theirs), name
    assert draft_source.recorded({"draft_model": json.loads(json.dumps(source.draft.as_fields()))}) == source.draft


def test_a_model_with_a_draft_model_can_be_sent_to_another_process(head):
    """Compilers run in processes of their own."""
    copy = pickle.loads(pickle.dumps(head.random.model))
    assert copy.config == head.random.model.config
    assert repr(copy.config) == repr(head.random.model.config)
    assert "0x" not in repr(copy.config), "stamps of builds hold it"


@pytest.mark.parametrize("name", DRAFT_PRESETS)
def test_presets_fit_the_models_that_they_are_named_after(name):
    preset = DRAFT_PRESETS[name]
    assert " @" in preset["source"]
    source = draft_source.with_draft_model(registry.find(preset["target"]), name)
    config = source.model.config
    layers = len(config.target.layer_kinds)
    assert config.draft.taps == (2, layers // 2, layers - 3)
    assert source.model.has_draft_head


def test_a_head_for_another_model_is_refused():
    with pytest.raises(ConfigError) as error:
        draft_source.with_draft_model(registry.find("qwen3-32b"), "qwen3-8b-eagle3")
    assert "preset qwen3-8b-eagle3: target_hidden_size is 4096, and the model's hidden_size is 5120" in str(error.value)
    with pytest.raises(ConfigError, match=r"vocab_size is 151936, and the model's vocab_size is 248320"):
        draft_source.with_draft_model(registry.find("qwen3.5-9b"), "qwen3-8b-eagle3")


@pytest.mark.parametrize(
    "changes, error, named",
    [
        ({"norm.weight": None}, CheckpointError, "draft: tensor norm.weight (expected [44]) is missing"),
        ({"fc.weight": torch.zeros(44, 88)}, CheckpointError, "draft: tensor fc.weight (found [44, 88], expected [44, 132]) has"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(10)}, CheckpointError, "q_norm.weight is not part of the model"),
        ({"fc_norm.0.weight": torch.ones(44)}, CheckpointError, "draft: tensor fc_norm.0.weight is not part of the model"),
        ({"lm_head.weight": torch.zeros(41, 44, dtype=torch.int8)}, CheckpointError, "draft: tensor lm_head.weight (I8; expected"),
        ({"d2t": torch.full((41,), 97)}, CheckpointError, "d2t maps to the id 97; the model's vocabulary has 97 tokens"),
        ({"d2t": None}, ConfigError, "needs the tensor d2t, which the checkpoint lacks"),
        ({"fields": {"architectures": ["Eagle3Speculator"]}}, UnknownModel, "the architecture is 'Eagle3Speculator'; legal"),
        ({"fields": {"quantization_config": {"quant_method": "fp8"}}}, CheckpointError, "is quantised; legal is a draft model in floats"),
        ({"fields": {"vocab_size": 89}}, ConfigError, "vocab_size is 89, and the model's vocab_size is 97"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(written, changes, error, named):
    with pytest.raises(error) as raised:
        load(*written(**changes))
    assert named in str(raised.value)


@pytest.mark.parametrize("said_by", ["quant_model_description.json", "optional/quarot.safetensors"])
def test_a_head_for_a_model_of_rotated_hidden_states_is_refused(written, said_by):
    """Its drafts would be refused, one and all. Rotations that ModelSlim wrote are said by its description."""
    model, draft = written()
    described = json.loads((modelslim.FIXTURES / "moe_w4a8_quarot" / "quant_model_description.json").read_text())
    plain = {**described, "optional": {}}
    (model / "quant_model_description.json").write_text(json.dumps(plain))
    assert draft_source.with_draft_model(registry.find(model), draft).draft is not None
    if said_by.endswith("json"):
        (model / said_by).write_text(json.dumps(described))
    else:
        (model / "optional").mkdir()
        save_file({"global_rotation": torch.eye(44)}, model / said_by)
    with pytest.raises(CheckpointError, match=rf"--draft-model .*draft: .* and .*model/{said_by} says that those of model are rotated"):
        draft_source.with_draft_model(registry.find(model), draft)


def test_a_truncated_or_absent_checkpoint_is_refused_by_name(written, tmp_path):
    model, draft = written()
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"draft/model.safetensors: truncated or corrupt"):
        load(model, draft)
    file.rename(draft / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds none of model.safetensors.*it holds pytorch_model.bin"):
        load(model, draft)
    with pytest.raises(UnknownModel, match=r"is neither a preset of a draft model nor a directory; presets are qwen3-4b-eagle3"):
        load(model, tmp_path / "nothing")
    assert oracle.case("plain").model.has_draft_head is False
