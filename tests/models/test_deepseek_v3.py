"""models/deepseek_v3.py: configurations are read by field, the draft head equals MtpLayer, and copies on disk are named, not read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import oracle, rotated, speculators

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError
from npucompile.models import checkpoint, deepseek_v3, registry
from npucompile.models.quant import description
from npucompile.models.quant.formats import PLAIN as PLAIN_FORMATS
from npucompile.models.routing import SIGMOID, Routing

TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "name",
    ["latent", "latent-yarn", "latent-whole-queries", "latent-all-dense", "sparse", "pairs", "shared-index", "biased", "biased-raw-heads"],
)
@torch.no_grad()
def test_draft_head_equals_mtp_layer_and_recurses(name):
    oracle.DraftRun(name).check_recursion(TOLERANCE)


@pytest.mark.parametrize("name", ["latent", "latent-whole-queries", "sparse", "pairs", "shared-index", "biased"])
def test_sources_of_the_draft_head_name_every_tensor_of_mtp_layer(name):
    oracle.DraftRun(name).check_sources()


def test_the_layer_behind_the_layers_is_read_when_drafting_and_its_copies_never(tmp_path):
    """As published, it has copies of embedding and head; a model that does not draft reads nothing of it."""
    random = oracle.drafting("latent")
    family, config = random.model.family, random.model.config
    params, behind = family.abstract_params(config, torch.float32), "model.layers.3."
    tensors = {name: tensor.contiguous() for name, tensor in oracle.split(params, random.weights).items()}
    tensors |= {behind + name: torch.randn(97, 44) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    read = {}
    for directory, extra in (("whole", {}), ("more", {behind + "self_attn.q_bias": torch.zeros(3)})):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text(json.dumps(random.values))
        save_file(tensors | extra, tmp_path / directory / "model.safetensors")
        read[directory] = checkpoint.open_checkpoint(tmp_path / directory)
    loaded = checkpoint.load(read["whole"], params)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.flatten(loaded), tree.flatten(random.weights), strict=True))
    without = {name: param for name, param in params.items() if name != deepseek_v3.DRAFT}
    assert deepseek_v3.DRAFT not in checkpoint.load(read["more"], without)
    with pytest.raises(CheckpointError, match=r"model.layers.3.self_attn.q_bias is not part of the model"):
        checkpoint.load(read["more"], params)


def test_routing_is_what_the_file_says():
    assert oracle.case("latent").model.config.routing == Routing(SIGMOID, 3, True, 2.5, 4, 2)
    assert oracle.case("latent-whole-queries").model.config.routing == Routing(SIGMOID, 3, False, 2.5, 1, 1)


def test_routers_have_logits_in_float32():
    layer = deepseek_v3.abstract_params(oracle.case("latent").model.config, torch.bfloat16)["layers"][1]["mlp"]
    assert {name for name, param in layer.items() if param.aval.dtype == torch.float32} == {"router", "router_bias"}


def test_older_files_read_the_same():
    values = oracle.CASES["latent-yarn"]
    older = {key: value for key, value in values.items() if key != "rope_parameters"} | {"rope_theta": 10_000, "scoring_func": "sigmoid"}
    scaling = {name: value for name, value in oracle.LATENT_YARN.items() if name not in ("rope_type", "rope_theta")}
    assert deepseek_v3.read_config({**older, "rope_scaling": {"type": "yarn", **scaling}}) == deepseek_v3.read_config(values)


def served(directory, drafts=3, vocab=0):
    """Tokens and drafts of a checkpoint's model, step by step."""
    entry = registry.find(directory)
    formats = description.formats_in(directory) or PLAIN_FORMATS
    variant = replace(entry.model.config.variant, formats=formats, draft_vocab=vocab)
    model = replace(entry.model, config=replace(entry.model.config, variant=variant), drafting=bool(drafts))
    weights = checkpoint.load(checkpoint.open_checkpoint(directory), model.params(torch.float32))
    server, request = speculators.Server(model, weights, drafts), speculators.Request(list(range(5, 25)), 1)
    rows = [server.prefill([request])]
    while len(request.output) < 12:
        rows.append(server.decode([request]))
    return request.output[:12], [row["drafts"].tolist() for row in rows] if drafts else []


@pytest.mark.parametrize("name", [pytest.param("pairs", marks=pytest.mark.long), "latent"])
@torch.no_grad()
def test_a_rotated_model_drafts_as_the_one_that_was_rotated(tmp_path, name):
    """By the tensor `rot.weight` and an output head of its own, as ModelSlim folds GLM-5 (tests/support/rotated.py)."""
    random = oracle.drafting(name)
    plain, folded = rotated.write(tmp_path / "plain", random, folded=False), rotated.write(tmp_path / "folded", random)
    tokens, drafts = served(plain)
    assert served(folded) == (tokens, drafts)
    assert served(folded, drafts=0) == (tokens, [])
    assert served(folded, vocab=50) == served(plain, vocab=50) != (tokens, drafts)
    # Later drafts are given what the head's own norm made, to which it applies the model's norm (as vllm-ascend does), the first is not.
    unlike = [rotated.write(tmp_path / f"unlike-{how}", random, folded=how, alike=False) for how in (False, True)]
    assert served(unlike[0], drafts=1) == served(unlike[1], drafts=1)
    # Neither what turns its hidden states nor its head can be left out.
    tensors = load_file(folded / "model.safetensors")
    for changed in ("rot.weight", behind(random) + deepseek_v3.OWN_HEAD):
        save_file({**tensors, changed: tensors[changed].flip(0).contiguous()}, folded / "model.safetensors")
        assert served(folded) != (tokens, drafts)
        assert served(folded)[0] == tokens


def test_a_rotation_that_the_description_does_not_declare_is_refused(tmp_path):
    folded = rotated.write(tmp_path / "folded", oracle.drafting("pairs"))
    said = json.loads((folded / description.DESCRIPTION).read_text())
    (folded / description.DESCRIPTION).write_text(json.dumps({**said, "is_rot_used": False}))
    with pytest.raises(CheckpointError, match=r"tensor rot.weight is not part of the model"):
        served(folded)


def behind(random):
    return f"model.layers.{len(random.model.config.layer_kinds)}."
