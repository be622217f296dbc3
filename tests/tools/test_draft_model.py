"""`--draft-model`: a model and a draft head of a second checkpoint are built, recorded and served as one, with the tokens of the model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle, oracle, tiny

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError, PartitionError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import checkpoint, draft_source
from npucompile.models.draft_model import PREFIX
from npucompile.tools.artifact_model import full_model
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.prove.small_model import shrink
from npucompile.tools.ranks.weights import check_checkpoint, rank_params

IDS = "1,2,3,4,5"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model that repeats its last token now and then, and a head that drafts what the model's own last layer would say."""
    root = tmp_path_factory.mktemp("both")
    sizes = oracle.plain(4, vocab_size=260, hidden_size=32, tie_word_embeddings=True)
    model = tiny.write_checkpoint(root / "model", seed=5, **{**tiny.NO_RECURRENT, **sizes, "num_experts": 0})
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 20
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    random = oracle.build(sizes)
    changes = {"draft_vocab_size": 200, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
    draft = eagle.write_agreeing(root / "head", model, random, **changes)
    return model, draft


def generated(home, *arguments):
    result = tiny.cli(home, "generate", *arguments, "--token-ids", IDS, "--max-tokens", 40, "--ignore-eos", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def artifact(checkpoints, tmp_path_factory):
    model, draft = checkpoints
    out = tmp_path_factory.mktemp("artifact") / "both"
    tiny.built(tiny.planned(model, draft_model=str(draft), num_speculative_tokens=2), out)
    return out


def test_tokens_are_those_of_the_model_without_drafts(checkpoints, artifact, tmp_path):
    model, draft = checkpoints
    without = generated(tmp_path, model, "--dtype", "float32")
    answers = [
        generated(tmp_path, model, "--draft-model", draft, "--dtype", "float32"),
        generated(tmp_path, artifact),
        generated(tmp_path, artifact, "--dtype", "float32"),
    ]
    for answer, drafts in zip(answers, (3, 2, 3), strict=True):
        assert answer["token_ids"] == without["token_ids"]
        assert len(answer["acceptance_rates"]) == drafts
        assert answer["acceptance_length"] > 1.5
    assert without["acceptance_rates"] == []


def test_the_artifact_records_both(checkpoints, artifact, tmp_path):
    model, draft = checkpoints
    manifest = Artifact.open(artifact).manifest
    record = manifest.model["draft_model"]
    assert json.loads(record["config"]) == json.loads((draft / "config.json").read_text())
    assert (record["name"], record["parts"], record["checkpoint"]) == ("head", ["d2t"], str(draft))
    arguments = manifest.build_arguments
    assert arguments[arguments.index("--draft-model") + 1] == str(draft)
    rebuilt = full_model(manifest)
    assert rebuilt.config == tiny.planned(model, draft_model=str(draft), num_speculative_tokens=2).model.config
    assert shrink(manifest, 2).model.config.draft.draft_vocab_size == shrink(manifest, 2).model.config.vocab_size // 2
    ids = load_file(artifact / manifest.weights)["params.draft.model_ids"]
    assert torch.equal(ids.long() - torch.arange(200), load_file(draft / "model.safetensors")["d2t"])
    # The digest is of both: other weights of the head are another model.
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((draft / "config.json").read_bytes())
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * 2}, changed / "model.safetensors")
    tiny.built(tiny.planned(model, draft_model=str(changed), num_speculative_tokens=2), tmp_path / "other")
    other = Artifact.open(tmp_path / "other").manifest
    assert other.source_digest != manifest.source_digest
    assert other.params == manifest.params


@pytest.mark.parametrize("weights", ["stored", "bound", "given"])
def test_every_rank_gets_its_slices_of_both(checkpoints, tmp_path, weights):
    """Also where another directory takes the place of the model's; the head's is found where it was."""
    model, draft = checkpoints
    options = {"mesh": "tp=2", "draft_model": str(draft), "weights": "stored" if weights == "stored" else "bound"}
    planned = tiny.planned_device(model, **options)
    artifact = tiny.without_graphs(planned, tmp_path / "out")
    given = shutil.copytree(model, tmp_path / "copy") if weights == "given" else None
    check_checkpoint(artifact, given)
    both = draft_source.open_both(model, planned.source.draft)
    whole = {f"params.{path}": tensor for path, tensor in tree.flatten(checkpoint.load(both, planned.model.params(planned.dtype)))}
    for rank in range(planned.mesh.size):
        shard = dict(rank_params(artifact, rank, checkpoint=given, wanted=None, progress=tiny.QUIET))
        assert set(shard) == set(whole)
        for leaf in artifact.manifest.params:
            expected = whole[leaf.name][planned.rules().local_slice(leaf.aval, planned.mesh, rank)]
            assert torch.equal(shard[leaf.name], expected), leaf.name


def test_another_head_than_the_one_it_was_built_with_is_refused(checkpoints, tmp_path):
    model, draft = checkpoints
    moved = shutil.copytree(draft, tmp_path / "head")
    planned = tiny.planned_device(model, mesh="tp=2", draft_model=str(moved), weights="bound")
    artifact = tiny.without_graphs(planned, tmp_path / "out")
    check_checkpoint(artifact, None)
    tensors = load_file(moved / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * 2}, moved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has digest content:.* was built from content:"):
        check_checkpoint(artifact, None)
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match=r"the draft model's checkpoint .*head is not there"):
        check_checkpoint(artifact, None)


def test_the_draft_model_stays_float_where_the_model_is_quantised():
    both = plan(Options("qwen3-32b", target="ascend-a3", mesh="tp=8", quantization="w8a8", draft_model="qwen3-32b-eagle3", backend="null"))
    names = {leaf for leaf in both.model.params(both.dtype)["draft"]["mlp"]["down"].source.names}
    assert names == {f"{PREFIX}midlayer.mlp.down_proj.weight"}
    layer = both.model.params(both.dtype)["layers"][0]["mlp"]
    assert isinstance(layer["gate_up"], dict), "a mapping of the tensors of a quantised matrix"
    assert both.limits.drafts == 3


def test_what_cannot_be_built_is_refused(checkpoints):
    model, _ = checkpoints
    small = model.parent / "small"
    small.mkdir()
    config = {**json.loads((model / "config.json").read_text()), "hidden_size": 4096, "vocab_size": 151936}
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"--draft-model qwen3-8b-eagle3 has no weights, small has; legal is a path"):
        plan(Options(str(small), backend="eager", draft_model="qwen3-8b-eagle3"))
    with pytest.raises(PartitionError, match=r"160 experts over the 64 devices of mesh tp=64: .*legal are meshes whose size divides 160"):
        plan(Options("qwen3-coder-480b-a35b", target="ascend-a3", mesh="tp=64", draft_model="qwen3-coder-480b-a35b-eagle3", backend="null"))
