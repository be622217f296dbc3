"""tools/lab/train/tiny_export.py: exported tensors are the parameters, and transformers loads them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from npucompile.graphs import tree
from npucompile.models import hybrid, qwen3_5
from npucompile.tools.lab.train import tiny_export, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("export")
    tokenizer = tiny_tokenizer.train_tokenizer(["in the beginning was the word"], vocab_size=280)
    config = tiny_model.hf_config(tiny_tokenizer.eos_id(tokenizer))
    cfg = qwen3_5.read_config(config)
    params = tiny_model.initial_params(cfg, 0)
    tiny_export.export(cfg, config, params, tokenizer, directory)
    return cfg, params, directory


def test_tensors_join_back_to_the_parameters(exported):
    cfg, params, directory = exported
    tensors = load_file(directory / "model.safetensors")
    for (path, declared), (_, value) in zip(tree.flatten(hybrid.abstract_params(cfg, torch.bfloat16)), tree.flatten(params), strict=True):
        parts = [tensors.pop(name) for name in declared.source.names]
        assert [tuple(part.shape) for part in parts] == list(declared.source.shapes), path
        assert torch.equal(declared.source.join(*parts).view(value.shape), value.to(torch.bfloat16)), path
    assert not tensors


def test_the_file_is_small_enough_to_bundle(exported):
    _, params, directory = exported
    assert (directory / "model.safetensors").stat().st_size < 12e6
    assert 3e6 < sum(leaf.numel() for _, leaf in tree.flatten(params)) < 6e6


def test_transformers_finds_every_tensor_it_wants(exported):
    transformers = pytest.importorskip("transformers")
    _, _, directory = exported
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == json.loads((directory / "config.json").read_text())["eos_token_id"]
