"""lowering/artifact/mapped.py: pages of a mapped file leave the process, and are read again when they are wanted."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from npucompile.lowering.artifact.mapped import release


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that a tensor lies in which are in this process's memory."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(x, 16) for x in head.split("-"))
            here = start <= tensor.data_ptr() < stop
        elif here and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    want = torch.arange(2**20, dtype=torch.int32)
    save_file({"x": want, "y": want + 1}, tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    assert torch.equal(tensors["x"], want)
    before = resident(tensors["x"])
    given_back = release([tensors["x"]])
    assert want.nbytes - 8192 <= given_back <= want.nbytes
    assert resident(tensors["x"]) <= before - given_back
    assert torch.equal(tensors["x"], want)
    assert torch.equal(tensors["y"], want + 1)


def test_other_memory_is_left_alone() -> None:
    tensor = torch.arange(2**20)
    assert release([tensor]) == 0
    assert torch.equal(tensor, torch.arange(2**20))


def test_nothing_is_given_back_where_the_system_does_not_say_what_is_mapped(tmp_path: Path) -> None:
    assert release([torch.zeros(2**20)], tmp_path / "absent") == 0
