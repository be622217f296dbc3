"""models/safetensors_files.py: the tensors of a checkpoint's files, what is refused, and which changes the digest notices."""

from __future__ import annotations

import itertools
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save, save_file

from npucompile.graphs.errors import CheckpointError
from npucompile.models import safetensors_files

TENSORS = {
    "b": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.zeros(2, 0),
    "bits": torch.tensor([True, False, True]),
    "eight": torch.arange(7, dtype=torch.float32).to(torch.float8_e4m3fn),
}


@pytest.fixture
def single(tmp_path):
    """A directory with one file and a config.json."""
    path = tmp_path / "single"
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def sharded(tmp_path):
    """A directory with two shards and their index; returns it and a function that rewrites the index."""
    path = tmp_path / "sharded"
    path.mkdir()
    placed = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(TENSORS)}
    for file in set(placed.values()):
        save_file({name: TENSORS[name] for name, at in placed.items() if at == file}, path / file)

    def index(**changes):
        weight_map = {name: file for name, file in {**placed, **changes}.items() if file is not None}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))

    index()
    return path, index


def test_entries_say_what_and_where(single):
    """The bytes that an entry names are the tensor's."""
    checkpoint = safetensors_files.open_checkpoint(single)
    content = (single / "model.safetensors").read_bytes()
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        entry = checkpoint.tensors[name]
        assert (entry.name, entry.file, entry.shape) == (name, single / "model.safetensors", tuple(tensor.shape))
        assert entry.nbytes == tensor.nbytes
        assert content[entry.begin : entry.end] == bytes(tensor.view(torch.uint8).flatten().tolist() if tensor.numel() else b"")
    assert {name: entry.dtype for name, entry in checkpoint.tensors.items()} == {
        "a": "BF16",
        "b": "F32",
        "none": "F32",
        "bits": "BOOL",
        "eight": "F8_E4M3",
    }
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_a_tensor_the_index_forgot_is_not_lost(sharded):
    path, index = sharded
    index(eight=None)
    assert "eight" in safetensors_files.open_checkpoint(path).tensors


@pytest.mark.parametrize("name, holder, shard", [("b", 1, 2), ("a", 2, 1)])
def test_the_index_decides_between_copies(sharded, name, holder, shard):
    path, _ = sharded
    there = {own: TENSORS[own] for own in (("b", "none", "eight") if shard == 1 else ("a", "bits"))}
    save_file({**there, name: torch.zeros(9)}, path / f"model-{shard}.safetensors")
    entry = safetensors_files.open_checkpoint(path).tensors[name]
    assert (entry.file.name, entry.shape) == (f"model-{holder}.safetensors", tuple(TENSORS[name].shape))


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_named(single, keep):
    file = single / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: truncated or corrupt safetensors: .*{len(content[:keep])} bytes"):
        safetensors_files.open_checkpoint(single)


@pytest.mark.parametrize("start", [b"\xff" * 8, b"\0" * 8, b"\x08" + b"\0" * 7 + b"{x", b"tail"])
def test_a_corrupt_file_is_named(single, start):
    file = single / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + start if start == b"tail" else start + content[len(start) :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt safetensors"):
        safetensors_files.open_checkpoint(single)


def test_a_directory_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        safetensors_files.open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(sharded):
    path, _ = sharded
    (path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: no such file, though model\.safetensors\.index\.json names it"):
        safetensors_files.open_checkpoint(path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded):
    path, index = sharded
    index(ghost="model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"says ghost is in model-1\.safetensors, which does not hold it"):
        safetensors_files.open_checkpoint(path)


@pytest.mark.parametrize("file", ["../single/model.safetensors", "/etc/passwd", "", 3, ["model-1.safetensors"]])
def test_an_index_may_not_leave_its_directory(sharded, file):
    path, index = sharded
    index(b=file)
    with pytest.raises(CheckpointError, match=r"weight_map says b is in .*expected the name of a file in the same directory"):
        safetensors_files.open_checkpoint(path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}', "[]", "{", "\0"])
def test_a_malformed_index_is_named(sharded, text):
    path, _ = sharded
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        safetensors_files.open_checkpoint(path)


def test_other_formats_are_refused_with_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, .*it holds pytorch_model\.bin"):
        safetensors_files.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        safetensors_files.open_checkpoint(tmp_path / "absent")


def digest(path) -> str:
    return safetensors_files.digest(safetensors_files.open_checkpoint(path))


def test_a_content_digest_is_of_the_content_alone(single, tmp_path):
    before = digest(single)
    assert before.startswith("content:")
    assert len(before) == len("content:") + 64
    copy = shutil.copytree(single, tmp_path / "copy")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert digest(copy) == before


@pytest.mark.parametrize("at", [-1, -20])
def test_a_content_digest_notices_one_changed_byte(single, at):
    file, before = single / "model.safetensors", digest(single)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert digest(single) != before


def test_a_digest_covers_config_and_every_shard(single, sharded):
    before = digest(single)
    (single / "config.json").write_text('{"rms_norm_eps": 1}')
    assert digest(single) != before
    path, _ = sharded
    digests = {digest(path)}
    for file in sorted(path.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        digests.add(digest(path))
    assert len(digests) == 3


def test_a_large_checkpoint_is_known_by_sizes_headers_and_samples(tmp_path, monkeypatch):
    """A copy has the same digest; a byte between the samples is not noticed."""
    monkeypatch.setattr(safetensors_files, "LARGEST_CONTENT_DIGEST_BYTES", 64)
    monkeypatch.setattr(safetensors_files, "_MIB", 4)
    monkeypatch.setattr(safetensors_files, "_SAMPLE_BYTES", 2)
    path = tmp_path / "large"
    path.mkdir()
    save_file({"w": torch.arange(4096, dtype=torch.float32)}, path / "model.safetensors", metadata={"format": "pt"})
    file, before = path / "model.safetensors", digest(path)
    assert before.startswith("outline:")
    original = file.read_bytes()
    sampled = [len(original) * i // 64 for i in range(64)]
    copy = shutil.copytree(path, tmp_path / "copy")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert digest(copy) == before
    digests = {before}
    places = [(at, True) for at in (len(original) - 1, sampled[20], sampled[63] + 1)] + [(sampled[20] + 2, False), (sampled[40] - 1, False)]
    for at, noticed in places:
        file.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        assert (digest(path) not in digests) == noticed, at
        digests.add(digest(path))
    for changed in (original.replace(b'"pt"', b'"PT"'), original):
        file.write_bytes(changed)
        assert (digest(path) == before) == (changed == original)


@pytest.mark.parametrize(
    "region",
    [
        (slice(0, 3), slice(0, 4), slice(0, 5)),
        (slice(1, 2), slice(0, 4), slice(0, 5)),
        (slice(0, 3), slice(1, 3), slice(0, 5)),
        (slice(1, 3), slice(2, 4), slice(1, 4)),
        (slice(0, 3), slice(0, 4), slice(4, 5)),
        (slice(1, 1), slice(0, 4), slice(0, 5)),
    ],
)
def test_a_part_is_read_alone(tmp_path, monkeypatch, region):
    """No byte beside the part is read, and neighbouring bytes are read at once."""
    whole, read = torch.arange(60, dtype=torch.bfloat16).view(3, 4, 5), []
    save_file({"before": torch.ones(7), "w": whole}, tmp_path / "model.safetensors")
    entry = safetensors_files.open_checkpoint(tmp_path).tensors["w"]
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read.append((at, len(buffers[0]))) or preadv(file, buffers, at))
    part = entry.read_slice(region)
    assert part.dtype == whole.dtype
    assert torch.equal(part, whole[region])
    assert sum(count for _, count in read) == part.nbytes
    assert all(at + count < after for (at, count), (after, _) in itertools.pairwise(read))


def test_a_file_that_vanished_is_named(single):
    checkpoint = safetensors_files.open_checkpoint(single)
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read any more"):
        safetensors_files.digest(checkpoint)


def test_an_entry_reads_its_bytes_and_refuses_a_file_that_became_shorter(single):
    tensors = safetensors_files.open_checkpoint(single).tensors
    file, entries = single / "model.safetensors", [entry for entry in tensors.values() if entry.dtype in safetensors_files.DTYPES]
    assert entries
    for entry in entries:
        tensor = entry.read()
        assert tensor.dtype == TENSORS[entry.name].dtype
        assert torch.equal(tensor, TENSORS[entry.name])
    last = max(entries, key=lambda entry: entry.end)
    os.truncate(file, last.end - 1)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: ends 1 bytes before the end of {last.name}"):
        last.read()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read any more"):
        last.read()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_layout_is_the_librarys_for_every_dtype_and_name(metadata):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
    tensors = {f'{i % 3}"é.{dtype}': torch.zeros([(), (3,), (2, 1, 5)][i % 3], dtype=dtype) for i, dtype in enumerate(dtypes)}
    whole = save(tensors, metadata)
    header, offsets = safetensors_files.layout({name: tensor.to("meta") for name, tensor in tensors.items()}, metadata)
    assert whole.startswith(header)
    assert len(header) == min(offsets.values())
    assert len(whole) == len(header) + sum(tensor.nbytes for tensor in tensors.values())
