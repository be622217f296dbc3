"""models/tied_head.py: what a checkpoint stores decides whether its head is the embedding, whatever its configuration says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import oracle, tiny

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError
from npucompile.models import checkpoint, registry
from npucompile.models.tied_head import _same_values
from npucompile.tools.builder import weights
from npucompile.tools.builder.plan import Options, plan

TIED = "tie_word_embeddings"


def write(directory, name, head, **fields):
    """The checkpoint of a tied oracle: without a head, with the embedding as its head, or with another one."""
    random = oracle.case(name)
    tensors = {key: tensor.clone() for key, tensor in random.theirs.state_dict().items() if key != "lm_head.weight"}
    embedding = tensors["model.embed_tokens.weight"]
    if head != "none":
        tensors["lm_head.weight"] = embedding.clone() if head == "same" else embedding.flip(0)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**random.values, **fields}))
    return tensors


def read(directory):
    source = registry.find(directory)
    return source, checkpoint.load(checkpoint.open_checkpoint(directory), source.model.params(torch.float32))


@pytest.mark.parametrize("head", ["none", "same", "other"])
@pytest.mark.parametrize("name", ["dense-tied", "moe-tied", "next-raw", "plain-tied", "latent-whole-queries"])
def test_the_head_that_is_stored_is_read(tmp_path, name, head):
    tensors = write(tmp_path / "x", name, head)
    source, params = read(tmp_path / "x")
    assert source.model.config.tie_word_embeddings is (head != "other")
    used = params.get("head", params["embed"])
    assert torch.equal(used, tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]))
    # What an artifact records gives the same model again.
    assert registry.from_config("x", json.loads(source.text)) == source.model


@pytest.mark.parametrize("head", ["none", "other"])
@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True), (None, True), (True, None)])
def test_a_wrapped_file_may_say_it_in_two_places(tmp_path, outer, inner, head):
    tensors = write(tmp_path / "x", "dense-tied", head)
    text = {**json.loads((tmp_path / "x" / "config.json").read_text()), TIED: inner}
    (tmp_path / "x" / "config.json").write_text(json.dumps({"model_type": "qwen3_5", TIED: outer, "text_config": text}))
    source, params = read(tmp_path / "x")
    assert source.model.config.tie_word_embeddings is (head == "none")
    assert ("head" in params) is (head == "other")
    assert head == "none" or torch.equal(params["head"], tensors["lm_head.weight"])


@pytest.mark.parametrize("target", ["cpu", "ascend-a3"])
def test_a_build_lays_out_the_head_that_is_stored(tmp_path, target):
    """Graphs for NPUs bind weights by their parameters: whether there is a head is decided before anything is traced."""
    directory = tiny.write_checkpoint(tmp_path / "x", tie_word_embeddings=True)
    options = Options(str(directory), target=target, buckets=(1,), max_model_len=128, backend="null" if target == "ascend-a3" else "eager")
    tied = plan(options)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}, directory / "model.safetensors")
    planned = plan(options)
    assert "head" not in tied.model.params(tied.dtype)
    assert "head" in planned.model.params(planned.dtype)
    if target == "ascend-a3":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            weights.bind_weights(tied)


def test_a_quantised_head_is_the_one_that_is_stored(tmp_path):
    tensors = write(tmp_path / "x", "dense-tied", "other")
    planned = plan(Options(str(tmp_path / "x"), quantization="w8a8-all", backend="eager", buckets=(1,), max_model_len=64))
    head = checkpoint.load(checkpoint.open_checkpoint(tmp_path / "x"), planned.model.params(torch.float32))["head"]
    rounded = (tensors["lm_head.weight"] / head["scale"][:, None]).round().to(torch.int8)
    assert torch.equal(head["weight"].T, rounded)


def test_heads_are_compared_as_numbers_and_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("npucompile.models.tied_head._BLOCK_BYTES", 100)
    values = torch.randn(50, 7).bfloat16()
    last = values.clone()
    last[-1, -1] += 1
    nan = torch.full_like(values, torch.nan)
    cases = {"same": values.float(), "last": last, "nan": nan, "shape": values[:-1].clone(), "int": values.to(torch.int8)}
    save_file({"values": values, **cases}, tmp_path / "model.safetensors")
    entries = checkpoint.open_checkpoint(tmp_path).tensors
    assert [name for name in cases if _same_values(entries["values"], entries[name], ())] == ["same"]


CONTRADICTIONS = {
    "lm_head.bias": lambda tensors: torch.ones(97),
    "score.weight": lambda tensors: torch.ones(2, 2),
    "model.embed_tokens.scale": lambda tensors: torch.ones(1),
    "model.layers.1.self_attn.q_proj.bias": lambda tensors: torch.ones_like(tensors["model.norm.weight"]),
    "model.layers.1.self_attn.sinks": lambda tensors: torch.ones(4),
    "model.layers.9.input_layernorm.weight": lambda tensors: tensors["model.norm.weight"].clone(),
    "model.extra_norm.weight": lambda tensors: tensors["model.norm.weight"].clone(),
}


@pytest.mark.parametrize("name", ["dense", "moe", "next", "plain", "plain-moe", "latent", "sparse"])
def test_a_tensor_that_the_configuration_does_not_know_is_refused(name, tmp_path):
    """One tensor more than the configuration has, of any part of the model: a term that would be missing in what it computes."""
    random = oracle.case(name)
    tensors = dict(random.theirs.state_dict())
    behind = f"model.layers.{len(random.model.config.layer_kinds)}.self_attn.o_proj.weight"
    experts = [key for key in tensors if ".experts.gate_up_proj" in key]
    more = {**CONTRADICTIONS, behind: lambda _: torch.ones(2, 2)}
    more |= {experts[0]: lambda tensors: torch.cat([tensors[experts[0]]] * 2)} if experts else {}
    for added, value in more.items():
        save_file({**tensors, added: value(tensors)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"tensor {added.replace('.', '[.]')}"):
            checkpoint.ParamReader(checkpoint.open_checkpoint(tmp_path), random.model.params(torch.float32))


def test_buffers_of_frequencies_follow_from_the_configuration(tmp_path):
    random = oracle.case("plain")
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
    save_file({**random.theirs.state_dict(), **{name: torch.ones(8) for name in names}}, tmp_path / "model.safetensors")
    loaded = checkpoint.load(checkpoint.open_checkpoint(tmp_path), random.model.params(torch.float32))
    for (path, ours), (_, theirs) in zip(tree.flatten(loaded), tree.flatten(random.weights), strict=True):
        assert torch.equal(ours, theirs), path


@pytest.mark.parametrize("prefix", ["transformer.", "language_model.model."])
def test_a_missing_tensor_is_named_with_how_names_begin_there(tmp_path, prefix):
    random = oracle.case("plain")
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in random.theirs.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"is missing; .*names there begin with .*{prefix}layers\."):
        checkpoint.ParamReader(checkpoint.open_checkpoint(tmp_path), random.model.params(torch.float32))
