"""models/directories.py: a directory that is no checkpoint is refused with what it is, and files that are links to nothing are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import tiny

from npucompile.graphs.errors import CheckpointError, ConfigError, NpucompileError
from npucompile.models import registry
from npucompile.models.safetensors_files import open_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "whole")


def refusal(directory: Path) -> str:
    with pytest.raises(NpucompileError) as error:
        open_checkpoint(registry.find(directory).checkpoint_dir or directory)
    return str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_link_to_nothing_is_named_with_what_it_points_to(model: Path, tmp_path: Path, name: str) -> None:
    """Those of a tokenizer and of defaults were taken for absent, and the model served without them."""
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to("../blobs/gone")
    assert f"copy/{name}: a link to ../blobs/gone, which is not there: the download is not complete" in refusal(copy)


def test_a_shard_that_is_a_link_to_nothing_is_named(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    (copy / "model-2.safetensors").symlink_to("gone")
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors: a link to gone, which is not there" in refusal(copy)


def test_the_folders_of_the_hub_are_told_their_snapshots(model: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    assert f"it is the hub's folder of a model, whose checkpoint is {snapshot}" in refusal(snapshot.parents[1])
    assert "it is the hub's cache; legal is MODEL/snapshots/HASH of one of models--Qwen--Qwen3-8B" in refusal(hub)
    assert "hub's cache" in refusal(tmp_path)
    (snapshot / "config.json").unlink()
    assert "of which no snapshot has a config.json" in refusal(snapshot.parents[1])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-8B"}'},
            "it holds an adapter (LoRA) of Qwen/Qwen3-8B, which is merged",
        ),
        ({"adapter_config.json": "[", "adapter_model.safetensors": ""}, "it holds an adapter (LoRA), which is merged"),
        ({"Qwen3-8B-Q4_K_M.gguf": ""}, "it holds Qwen3-8B-Q4_K_M.gguf, GGUF"),
        ({"pytorch_model-00001-of-00002.bin": ""}, "weights that pickle wrote"),
        ({"README.md": "", "b": ""}, "there is README.md, b"),
        ({}, "there is nothing"),
    ],
)
def test_what_is_no_checkpoint_is_said(model: Path, tmp_path: Path, files: dict[str, str], said: str) -> None:
    """With config.json, and without."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert said in refusal(tmp_path)
    shutil.copyfile(model / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert (said if files else "there is config.json") in str(error.value)


def test_a_folder_of_checkpoints_names_them(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(model, tmp_path / name)
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'} hold one" in refusal(tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_a_whole_file_beside_an_index_of_others_is_refused_with_both(model: Path, tmp_path: Path, shards: bool) -> None:
    """transformers reads the whole file: here the index was, and where its shards were gone the file was not mentioned."""
    copy = shutil.copytree(model, tmp_path / "copy")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    if shards:
        shutil.copyfile(copy / "model.safetensors", copy / "model-00001-of-00002.safetensors")
    said = refusal(copy)
    assert "holds model.safetensors, and model.safetensors.index.json, which lists 1 other files" in said
    assert ("1 of them not there" in said) is not shards
    (copy / "model.safetensors.index.json").unlink()
    assert open_checkpoint(copy).tensors


def test_a_configuration_that_is_not_there_still_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file; a checkpoint directory holds config\.json, and there is nothing"):
        registry.find(tmp_path)
