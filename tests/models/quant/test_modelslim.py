"""Checkpoints that ModelSlim wrote: read bit by bit, and their models' logits are those of its own arithmetic."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import fleets, modelslim, oracle

from npucompile.graphs import tree
from npucompile.graphs.quantise import bits_scale, unpack_w4
from npucompile.graphs.types import Bucket, Mesh, Tree
from npucompile.models import checkpoint, registry, sharding_rules
from npucompile.models.quant.description import DESCRIPTION, formats_in
from npucompile.models.slices import Shard
from npucompile.models.step import Model
from npucompile.models.variant import Variant

EXACT = 1e-5
"""Relative error of a token's logits. An activation that lies between two integers may be rounded the other way: then those of its token,
and of tokens that follow it, differ by about one part in a hundred, or more if another expert is chosen. So medians are compared."""
MIXED, IN_PARTS = "dense_w8a8_mix_m4", "dense_w8a8_parts_m4"


@functools.cache
def model(name: str, shards: int = 1, decodes_only: bool = False) -> Model:
    """The model of a fixture in the formats of its description."""
    directory = modelslim.FIXTURES / name
    formats, plain = formats_in(directory, decodes_only=decodes_only), registry.find(directory).model
    assert formats is not None
    axes = (("q_heads", shards), ("ffn", shards)) if shards > 1 else ()
    return replace(plain, config=replace(plain.config, variant=Variant(formats=formats, grouped=plain.config.num_experts > 0, shards=axes)))


@functools.cache
def weights(name: str, shards: int = 1, decodes_only: bool = False) -> Tree:
    opened = checkpoint.open_checkpoint(modelslim.FIXTURES / name)
    return checkpoint.load(opened, model(name, shards, decodes_only).params(torch.float32))


def errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Relative root mean square errors of rows."""
    return (ours - theirs).square().mean(-1).sqrt() / theirs.square().mean(-1).sqrt()


def matrix_of(leaves: dict[str, torch.Tensor], lead: int) -> torch.Tensor:
    """The matrix `[lead..., out..., K]` that the tensors of a loaded weight stand for."""
    weight, scale = leaves["weight"], leaves["scale"]
    if weight.dtype == torch.int32:
        weight, scale = unpack_w4(weight), bits_scale(scale)
        return (weight * scale.repeat_interleave(weight.shape[lead] // scale.shape[lead], lead)).movedim(lead, -1)
    scale = scale[0] if scale.dim() > weight.dim() - 1 else scale
    return (weight * scale.unsqueeze(lead)).movedim(lead, -1)


def sources(name: str, param: Any) -> list[torch.Tensor]:
    """What ModelSlim's arithmetic makes of the tensors that a float parameter is made of."""
    return [
        _source(name, tensor.removesuffix(".weight"), shape) for tensor, shape in zip(param.source.names, param.source.shapes, strict=True)
    ]


def _source(name: str, matrix: str, shape: tuple[int, ...]) -> torch.Tensor:
    experts, _, fused = matrix.partition(".experts.")
    if not fused:
        return modelslim.dequantised(name, matrix)
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    each = [[modelslim.dequantised(name, f"{experts}.experts.{e}.{part}") for part in parts] for e in range(shape[0])]
    return torch.stack([torch.cat(rows) for rows in each])


@pytest.mark.parametrize("name", [*modelslim.NAMES, modelslim.LATENT])
def test_matrices_are_those_of_modelslim_bit_by_bit(name: str) -> None:
    config, loaded = model(name).config, weights(name)
    float_params, quantised = registry.find(modelslim.FIXTURES / name).model.params(torch.float32), 0
    for path, param in tree.flatten(float_params):
        leaf: Any = loaded
        for key in path.split("."):
            leaf = leaf[int(key)] if isinstance(leaf, list) else leaf[key]
        if param.role in ("", "norm"):
            continue
        lead = 1 if param.role.startswith("experts") else 0
        if isinstance(leaf, list):
            quantised += compare_parts(name, param, leaf)
            continue
        if not isinstance(leaf, dict) or "scale" not in leaf:
            plain = leaf["weight"].movedim(1, -1) if isinstance(leaf, dict) and lead else leaf
            plain = plain["weight"] if isinstance(plain, dict) else plain
            assert torch.equal(plain, param.source.join(*sources(name, param))), path
            continue
        quantised += 1
        assert torch.equal(matrix_of(leaf, lead), param.source.join(*sources(name, param))), path
    assert quantised >= len(config.layer_kinds)


def compare_parts(name: str, param: Any, parts: list[Any]) -> int:
    """Every row of the matrix is in one of its parts, in the order of the matrix; returns how many parts are integers."""
    rows, integers = param.source.join(*sources(name, param)), 0
    found = []
    for part in parts:
        integers += (quantised := isinstance(part, dict) and "scale" in part)
        found.append(matrix_of(part, 0) if quantised else part["weight"] if isinstance(part, dict) else part)
    assert torch.equal(torch.cat(found, 1).flatten(0, 1), rows.flatten(0, -2))
    return integers


def test_a_draft_head_behind_the_layers_is_read_bit_by_bit() -> None:
    own = replace(model(modelslim.LATENT), drafting=True)
    read = checkpoint.load(checkpoint.open_checkpoint(modelslim.FIXTURES / modelslim.LATENT), own.params(torch.float32))["mtp"]
    plain = registry.find(modelslim.FIXTURES / modelslim.LATENT).model
    params = replace(plain, drafting=True).params(torch.float32)["mtp"]
    for leaf, param, lead in (
        (read["layer"]["mixer"]["down"], params["layer"]["mixer"]["down"], 0),
        (read["layer"]["mlp"]["gate_up"], params["layer"]["mlp"]["gate_up"], 1),
        (read["layer"]["mlp"]["shared_down"], params["layer"]["mlp"]["shared_down"], 0),
    ):
        assert leaf["weight"].dtype == torch.int8
        assert torch.equal(matrix_of(leaf, lead), param.source.join(*sources(modelslim.LATENT, param)))
    assert torch.equal(read["fc"], modelslim.tensors(modelslim.LATENT)["model.layers.2.eh_proj.weight"].float())


@pytest.mark.parametrize("name", [name for name in modelslim.NAMES if "w4a8" in name])
def test_the_correction_of_int4_is_modelslims(name: str) -> None:
    """It writes `scale_bias`, 8 times the sums of rows, with scales of groups in bfloat16; we make it of the integers."""
    loaded, stored, compared = weights(name), modelslim.tensors(name), 0
    for i, layer in enumerate(loaded["layers"]):
        assist = layer["mlp"]["gate_up"].get("assist")
        for e in range(len(assist) if assist is not None else 0):
            for index, part in enumerate(("gate", "up")):
                theirs = stored[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.scale_bias"].squeeze(1)
                assert errors(assist[e, index], theirs) < (0.02 if "group" in name else 1e-5)
                compared += 1
    assert compared


PROMPTS = [[3, 200, 41, 7, 99, 150, 260, 18], [77, 12, 230, 5, 64]]


@torch.no_grad()
def run(own: Model, loaded: Tree) -> torch.Tensor:
    """Logits after every token of both prompts, in one prefill bucket."""
    rows = [oracle.Row(ids, 0, list(range(1 + 5 * i, 6 + 5 * i)), 1 + i, [1 + i]) for i, ids in enumerate(PROMPTS)]
    state = oracle.poisoned(own.state(oracle.LIMITS, torch.float32))
    hidden, _, _ = own.family.forward(own.config, loaded, state, oracle.inputs(Bucket("prefill", 2, 8), rows))
    logits = own.family.head(own.config, loaded, hidden).view(2, 8, -1)
    return torch.cat([row[: len(ids)] for row, ids in zip(logits, PROMPTS, strict=True)])


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("name", "decodes"), [*((name, False) for name in modelslim.NAMES), (MIXED, True), (IN_PARTS, True)])
def test_logits_are_those_of_modelslims_arithmetic(name: str, decodes: bool, shards: int) -> None:
    ours = run(model(name, shards, decodes), weights(name, shards, decodes))
    theirs = torch.cat([modelslim.logits(name, ids, shards, decodes) for ids in PROMPTS])
    assert errors(ours, theirs).median() < EXACT


@pytest.mark.parametrize("name", [MIXED, "moe_w8a8_m4"])
def test_biases_that_are_left_out_change_the_logits(name: str) -> None:
    """Smoothing that shifts activations leaves one at norms and one at the matrices behind them."""
    own = model(name)
    formats = replace(own.config.variant.formats, biased=())
    bare = replace(own, config=replace(own.config, variant=replace(own.config.variant, formats=formats)))
    stripped = _without_biases(weights(name))
    assert [path for path, _ in tree.flatten(stripped)] == [path for path, _ in tree.flatten(bare.params(torch.float32))]
    theirs = torch.cat([modelslim.logits(name, ids) for ids in PROMPTS])
    assert errors(run(bare, stripped), theirs).median() > 1000 * EXACT


def _without_biases(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_biases(child) for child in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _without_biases(child) for key, child in node.items() if key != "bias"}
    return kept["weight"] if list(kept) == ["weight"] and "bias" in node else kept


def test_a_recipe_may_leave_one_of_several_matrices_float() -> None:
    """As that of Qwen3-32B does: a gate projection beside an int8 up projection."""
    first, second = weights(IN_PARTS)["layers"]
    (gate, up), (query, key, value) = first["mlp"]["gate_up"], second["mixer"]["qkv"]
    assert [part["weight"].dtype for part in (gate, up, query, key, value)] == [torch.float32, *[torch.int8] * 2, torch.float32, torch.int8]
    assert isinstance(first["mixer"]["qkv"], dict)
    assert isinstance(second["mlp"]["gate_up"], dict)


@pytest.mark.parametrize("name", modelslim.NAMES)
def test_ranks_read_their_parts_and_serve_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with what it reads of the files: prefill in two chunks, then greedy steps."""
    serve_on_two_ranks(name, monkeypatch)


def test_float_matrices_behind_a_shifted_norm_have_biases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a recipe leaves matrices of some layers float."""
    stored, source = dict(modelslim.tensors(MIXED)), modelslim.FIXTURES / MIXED
    description = json.loads((source / DESCRIPTION).read_text())
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    for matrix in [f"model.layers.0.{part}_proj" for part in parts]:
        rounded = modelslim.dequantised(MIXED, matrix).bfloat16()
        for name in [name for name in stored if name.startswith(matrix) and not name.endswith(".bias")]:
            del stored[name], description[name]
        stored[f"{matrix}.weight"], description[f"{matrix}.weight"] = rounded, "FLOAT"
    save_file(stored, tmp_path / "quant_model_weights.safetensors")
    (tmp_path / DESCRIPTION).write_text(json.dumps(description))
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    attention = weights(str(tmp_path))["layers"][0]["mixer"]["qkv"]
    assert list(attention) == ["weight", "bias"]
    assert attention["weight"].is_floating_point()
    serve_on_two_ranks(str(tmp_path), monkeypatch)


def serve_on_two_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, own = Mesh.parse("tp=2"), model(name, 2)
    whole = weights(name, 2)
    monkeypatch.setattr(fleets, "weights", lambda _: whole)
    fleet = fleets.Fleet(own, mesh)
    rules = sharding_rules.rules(mesh, experts=own.config.num_experts, tokens=1)
    reader = checkpoint.ParamReader(checkpoint.open_checkpoint(modelslim.FIXTURES / name), own.params(torch.float32))
    for rank, params in enumerate(fleet.params):
        shard = Shard(mesh, rules, rank)
        read = dict(pair for group in reader.groups for pair in reader.read(group, shard))
        assert all(torch.equal(read[position], tensor) for position, tensor in enumerate(params))
    serving, each = fleets.Serving(2, 0, [2]), []
    for bucket, inputs in serving.steps(3):
        outputs = fleet.step(bucket, inputs)
        serving.commit(bucket, inputs, outputs)
        if bucket.kind == "decode":
            for row, prompt in enumerate(serving.prompts[0]):
                ids = [*prompt, *serving.output[0][row]]
                each.append(errors(outputs[0]["logits"][row, 0], modelslim.logits(name, ids[:-1], 2)[-1]))
    assert torch.stack(each).median() < EXACT
