"""models/registry.py: presets and checkpoint directories are found with their end tokens, and refusals name the legal values."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ConfigError, ModelError, RequestError, UnknownModel
from npucompile.models import qwen3_5, registry
from npucompile.models.presets import BUNDLED, PRESETS
from npucompile.runtime.request import Sampling

TINY = {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
}


@pytest.fixture
def directory(tmp_path):
    """Writes a directory with these files, JSON unless they are text."""

    def write(**files):
        path = tmp_path / "some-model"
        path.mkdir(exist_ok=True)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (path / f"{name}.json").write_text(text, encoding="utf-8")
        return path

    return write


def test_a_directory_is_found_with_what_lies_in_it(directory):
    path = directory(config={**TINY, "eos_token_id": 7}, tokenizer={})
    checkpoint = registry.find(path)
    assert checkpoint.name == checkpoint.model.name == "some-model"
    assert checkpoint.model.family is qwen3_5.FAMILY
    assert (checkpoint.checkpoint_dir, checkpoint.tokenizer) == (path, path / "tokenizer.json")
    assert (checkpoint.eos_ids, checkpoint.max_position_embeddings) == ((7,), 128)
    assert registry.from_config(checkpoint.name, json.loads(checkpoint.text)) == checkpoint.model


def test_a_directory_without_a_tokenizer_has_none(directory):
    assert registry.find(directory(config=TINY)).tokenizer is None


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        (None, None, None),
        ({}, None, None),
        ({"chat_template": "a"}, None, "a"),
        ({"chat_template": "a"}, "b", "b"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None, None),
    ],
)
def test_a_chat_template_is_a_file_or_a_field(directory, config, text, expected):
    path = directory(config=TINY, **({} if config is None else {"tokenizer_config": config}))
    if text is not None:
        (path / "chat_template.jinja").write_text(text)
    assert registry.find(path).chat_template == expected


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "default"}], [{"name": "default", "template": 1}], {"default": "a"}])
def test_a_malformed_chat_template_is_named(directory, value):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: .*expected a text"):
        registry.find(directory(config=TINY, tokenizer_config={"chat_template": value}))


def test_special_tokens_are_texts_or_objects_with_one(directory):
    assert registry.find(directory(config=TINY)).special_tokens == {}
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None, "extra": 1}
    assert registry.find(directory(config=TINY, tokenizer_config=config)).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("value", [3, ["a"], {"text": 1, "content": 2}])
def test_a_malformed_special_token_is_named(directory, value):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: bos_token is .*expected a text"):
        registry.find(directory(config=TINY, tokenizer_config={"bos_token": value}))


def test_recommended_sampling_is_of_the_generation_config(directory):
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "repetition_penalty": 1.05, "min_p": None}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert registry.find(directory(config=TINY, generation_config=values)).sampling == expected


BEYOND = (-1e9, -2.1, -1, -0.5, 0, 0.0, 0.009, 0.5, 1, 1.5, 2.1, 20, 100.1, 2**31, float("nan"), float("inf"), "hot", True, [1])


@pytest.mark.parametrize("name", registry.SAMPLING)
def test_recommended_sampling_is_what_requests_may_have_or_refused(directory, name):
    """A server has it where a request says nothing: what no request may have would be refused in every one."""
    taken = []
    for value in BEYOND:
        path = directory(config=TINY, generation_config={name: value})
        # transformers writes -1 for a top_k that is off.
        expected = {} if (name, value) == ("top_k", -1) else {name: value}
        try:
            Sampling(**expected)
        except RequestError:
            with pytest.raises(ConfigError, match=re.escape(f"generation_config.json: {name} is {value!r}; expected a")):
                registry.find(path)
        else:
            assert registry.find(path).sampling == expected
            taken.append(value)
    assert {"top_k": {-1, 0, 1, 20}, "temperature": {0, 0.5, 1.5, 20}}.get(name, {0.5, 1}) <= set(taken)


@pytest.mark.parametrize("trailing", ["", "/", "/."])
def test_the_name_is_the_directorys_however_it_is_written(directory, trailing):
    assert registry.find(f"{directory(config=TINY)}{trailing}").name == "some-model"


@pytest.mark.parametrize("eos", ["7", -1, [1, "2"], True, 1.5, {"id": 3}])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_malformed_end_tokens_are_refused(directory, file, eos):
    files = {"config": TINY, file: {**(TINY if file == "config" else {}), "eos_token_id": eos}}
    with pytest.raises(ConfigError, match=rf"{file}.json: eos_token_id is .*expected a token id or a list"):
        registry.find(directory(**files))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_without_weights(name):
    preset = registry.find(name)
    assert (preset.name, preset.model.name, preset.checkpoint_dir, preset.tokenizer, preset.eos_ids) == (name, name, None, None, ())
    assert registry.from_config(name, json.loads(preset.text)) == preset.model


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_is_known_by_its_configuration(tmp_path, name):
    """A snapshot of a hub is a directory named by a hash; some releases have one configuration, and so one name."""
    directory = tmp_path / "8f0a61b3c2"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**PRESETS[name], "eos_token_id": 7}))
    known = registry.published_name(registry.find(directory))
    assert registry.find(known).model.config == registry.find(name).model.config
    scaled = {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}}
    if PRESETS[name].get("rope_theta") and not PRESETS[name].get("rope_scaling"):
        (directory / "config.json").write_text(json.dumps({**PRESETS[name], **scaled}))
        assert registry.published_name(registry.find(directory)) == known
    (directory / "config.json").write_text(json.dumps({**PRESETS[name], "hidden_size": 4096 + 128, "head_dim": 128}))
    assert registry.published_name(registry.find(directory)) == "8f0a61b3c2"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_lie_in_the_package(name):
    bundled = registry.find(name)
    assert bundled.name == bundled.model.name == name
    assert bundled.checkpoint_dir is not None
    assert bundled.checkpoint_dir.parts[-2:] == ("bundled", name)
    assert bundled.tokenizer is not None
    assert bundled.eos_ids


@pytest.mark.parametrize("typed, near", [("qwen3.5-27", "qwen3.5-27b"), ("Qwen3.6-27B", "qwen3.6-27b"), ("qwen35-tiny", "qwen3.5-tiny")])
def test_a_name_nearly_right_is_corrected(typed, near):
    with pytest.raises(UnknownModel, match=re.escape(f"did you mean {near}?")):
        registry.find(typed)


def test_an_unknown_name_is_answered_with_all_that_is_legal():
    with pytest.raises(UnknownModel) as error:
        registry.find("no/such/model")
    assert "'no/such/model' is neither a preset nor a directory;" in str(error.value)
    assert all(name in str(error.value) for name in registry.presets())
    assert "directory that holds config.json" in str(error.value)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        registry.find(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1', "[" * 100_000, '{"a": ' + "1" * 5000 + "}", '"\\ud800'])
def test_a_config_that_is_no_json_object_is_refused(directory, text):
    with pytest.raises(ConfigError, match=r"config\.json"):
        registry.find(directory(config=text))


def test_a_config_that_is_not_utf8_is_refused(directory):
    path = directory(config=TINY)
    (path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        registry.find(path)


@pytest.mark.parametrize("model_type", qwen3_5.FAMILY.model_types)
def test_every_model_type_of_the_family_selects_it(model_type):
    assert registry.from_config("x", {**TINY, "model_type": model_type}).family is qwen3_5.FAMILY


@pytest.mark.parametrize(
    "name", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"]
)
def test_architectures_serve_where_the_type_is_absent(name):
    assert registry.from_config("x", {**TINY, "model_type": None, "architectures": [name]}).family is qwen3_5.FAMILY


@pytest.mark.parametrize(
    "change, model_type",
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen35moe"}, "qwen35moe"),
        ({"model_type": None, "architectures": ["MambaForCausalLM"]}, "Mamba"),
    ],
)
def test_another_model_type_is_named_with_the_legal_ones(change, model_type):
    with pytest.raises(UnknownModel) as error:
        registry.from_config("x", {**TINY, **change})
    assert f"model_type {model_type!r} is not supported" in str(error.value)
    assert all(legal in str(error.value) for legal in qwen3_5.FAMILY.model_types)


@pytest.mark.parametrize("classes", [None, [], "Qwen3_5ForCausalLM", [3], {}])
def test_neither_type_nor_architecture_is_refused(classes):
    with pytest.raises(ConfigError, match="model_type is missing, and architectures is"):
        registry.from_config("x", {**TINY, "model_type": None, "architectures": classes})


def test_families_do_not_claim_the_same_model_type():
    claimed = [model_type for family in registry.families() for model_type in family.model_types]
    assert len(claimed) == len(set(claimed))
    assert {"qwen3", "qwen3_5", "qwen3_next"} <= {family.name for family in registry.families()}


NAMES = st.sampled_from(["full_attention", "linear_attention", "default", "silu"])
FIELDS = st.sampled_from([*TINY, "text_config", "rope_scaling", "full_attention_interval"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**30) | st.floats() | st.text(max_size=8) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TINY, "rope_theta", "rope_type"]), inner, max_size=4),
    max_leaves=6,
)


@given(changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_whatever_a_config_holds_it_is_read_or_refused(changes):
    """No value of any field makes anything but a model or a ModelError."""
    with contextlib.suppress(ModelError):
        assert registry.from_config("x", {**TINY, **changes}).family is qwen3_5.FAMILY
