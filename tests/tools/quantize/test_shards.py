"""tools/quantize/shards.py: files that are filled in any order are what the safetensors library reads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from npucompile.models.safetensors_files import open_checkpoint
from npucompile.tools.quantize.shards import ShardWriter

TENSORS = {
    "a": torch.arange(15, dtype=torch.int8).view(3, 5),
    "b": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "c": torch.tensor([2**40], dtype=torch.int64),
    "d": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
}


def announced(*names: str) -> dict[str, torch.Tensor]:
    return {name: TENSORS[name].to("meta") for name in names}


def test_what_is_written_is_read_back(tmp_path):
    save_file({"d": TENSORS["d"]}, tmp_path / "model.safetensors")
    writer = ShardWriter(tmp_path, "w", [announced("a", "b"), announced("c"), announced("d")], 48)
    for name in "cba":
        writer.write(name, TENSORS[name])
    with pytest.raises(AssertionError, match="d"):
        writer.finish()
    writer.copy(open_checkpoint(tmp_path).tensors["d"])
    index = json.loads(writer.finish().read_text())
    # 39 bytes and 8 fill the first file.
    files = {"a": 1, "b": 1, "c": 1, "d": 2}
    assert index["weight_map"] == {name: f"w-{number:05d}-of-00002.safetensors" for name, number in files.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        stored = load_file(tmp_path / index["weight_map"][name])[name]
        assert torch.equal(stored, tensor), name
        assert stored.dtype == tensor.dtype


def test_another_tensor_than_announced_is_not_written(tmp_path):
    writer = ShardWriter(tmp_path, "w", [announced("a")])
    with pytest.raises(AssertionError):
        writer.write("a", TENSORS["a"].t())


def test_a_file_that_becomes_shorter_is_noticed(tmp_path):
    save_file({"d": TENSORS["d"]}, tmp_path / "model.safetensors")
    entry = open_checkpoint(tmp_path).tensors["d"]
    writer = ShardWriter(tmp_path, "w", [announced("d")])
    entry.file.write_bytes(entry.file.read_bytes()[:-1])
    with pytest.raises(OSError, match="became shorter while it was copied"):
        writer.copy(entry)
