"""tools/ranks/same_model.py: an artifact of sizes alone takes the checkpoints of its model, and no other of the same shapes."""

from __future__ import annotations

import json
import shutil

import pytest
from support import pictured, tiny
from support.shown import SMALL

from npucompile.graphs.errors import CheckpointError
from npucompile.tools.notation import EncodeSize
from npucompile.tools.ranks.same_model import check_same_model

PLAIN = {
    **tiny.NPU_SIZES, **tiny.NO_RECURRENT, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True,
    "rope_parameters": None, "rope_theta": 1e6, "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def of_sizes(config, path, **options):
    """An artifact of a config.json alone, without graphs."""
    sizes = path / "sizes"
    sizes.mkdir(parents=True)
    (sizes / "config.json").write_text(json.dumps(config))
    plan = tiny.planned_device(sizes, **{"weights": None, "num_speculative_tokens": None, "max_model_len": 512, **options})
    artifact = tiny.without_graphs(plan, path / "out")
    assert artifact.manifest.source_digest == "none"
    return artifact


def changed(config, path, change):
    """A checkpoint directory of a changed file; tensors are compared by others."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({name: value for name, value in (config | change).items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"rope_theta": 100.0}, "rope_theta", ("100.0", "1000000.0")),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, "rope_theta", ("5000000.0", "1000000.0")),
        ({"rope_scaling": YARN}, "rope_scaling", ("factor=4", "None")),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", ("1e-05", "1e-06")),
        ({"norm_topk_prob": False}, "norm_topk_prob", ("False", "True")),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok", ("1", "2")),
        ({"max_position_embeddings": 256}, "max_position_embeddings", ("256", "512")),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", ("16", "32")),
    ],
)
def test_another_model_of_the_same_shapes_is_refused_with_the_field(tmp_path, change, field, values):
    config = {name: value for name, value in {**tiny.CONFIG, **PLAIN}.items() if value is not None}
    artifact = of_sizes(config, tmp_path)
    check_same_model(artifact, changed(config, tmp_path / "same", {"max_position_embeddings": 2048, "torch_dtype": "bfloat16"}))
    with pytest.raises(CheckpointError, match=rf"other: config\.json: {field} is .*built of sizes alone") as error:
        check_same_model(artifact, changed(config, tmp_path / "other", change))
    assert all(value in str(error.value) for value in values)


def test_layers_in_another_order_and_another_family_are_refused(tmp_path):
    config = tiny.CONFIG | tiny.NPU_SIZES
    artifact = of_sizes(config, tmp_path)
    # Without the head that the file declared, drafts are refused by their tensors; text has one position on all axes.
    kept = {"mtp_num_hidden_layers": 0, "rope_parameters": config["rope_parameters"] | {"mrope_section": [4, 2, 2]}}
    check_same_model(artifact, changed(config, tmp_path / "same", kept))
    with pytest.raises(CheckpointError, match=r"layer_types is \('full_attention', .*with \('linear_attention', "):
        check_same_model(artifact, changed(config, tmp_path / "order", {"layer_types": config["layer_types"][::-1]}))
    with pytest.raises(CheckpointError, match=r"the family is 'qwen3'; .* with 'qwen3_5'"):
        check_same_model(artifact, changed({**tiny.CONFIG, **PLAIN}, tmp_path / "family", {}))


def test_towers_and_how_pictures_are_prepared_are_compared_where_an_artifact_takes_pictures(tmp_path):
    whole = pictured.checkpoint(tmp_path / "checkpoint")
    sizes = tmp_path / "sizes"
    shutil.copytree(whole, sizes, ignore=shutil.ignore_patterns("*.safetensors"))
    plan = tiny.planned_device(sizes, weights=None, num_speculative_tokens=None, max_model_len=256, mesh="tp=1", encode=(EncodeSize(64),))
    artifact, config = tiny.without_graphs(plan, tmp_path / "out"), json.loads((whole / "config.json").read_text())
    check_same_model(artifact, whole)
    (whole / "preprocessor_config.json").write_text(json.dumps({**SMALL, "image_mean": [0.25] * 3}))
    with pytest.raises(CheckpointError, match=r"the processor of pictures: image_mean is \[0\.25, 0\.25, 0\.25\]; .* with \[0\.5, "):
        check_same_model(artifact, whole)
    shutil.copyfile(sizes / "preprocessor_config.json", whole / "preprocessor_config.json")
    (whole / "config.json").write_text(json.dumps({**config, "image_token_id": config["video_token_id"]}))
    with pytest.raises(CheckpointError, match=r"vision_config: image_token_id is"):
        check_same_model(artifact, whole)
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
    (whole / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mrope_section is \(2, 3, 3\)"):
        check_same_model(artifact, whole)
