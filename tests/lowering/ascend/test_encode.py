"""Encode buckets as graphs for NPUs, on emulated devices, write the rows of transformers' tower; what is padded changes none of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import encode_graphs, towers
from support.emulated import Machine

from npucompile.graphs import tree
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.lowering.ascend.acl_graph.file import decode as acl_decode
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.ge_file import decode
from npucompile.lowering.ascend.legality import check
from npucompile.lowering.lower import lower_eager
from npucompile.lowering.platform import CANN_RELEASES, CPU, Platform
from npucompile.models import checkpoint, encode_step, registry, vision

GRIDS = [(1, 6, 10), (1, 2, 4), (1, 8, 8)]
BUCKET, LIMITS = Bucket("encode", 4, 64), Limits(8, 9, 3, 64, picture_rows=60)
BACKENDS = ("ge", "aclgraph")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield tmp_path_factory.mktemp("encode")
    torch.set_num_threads(threads)


class Encoder:
    """The program of a small tower, and operands for it: padding is white, and the pool NaN."""

    def __init__(self, name: str, home: Path, dtype: torch.dtype, quantised: bool = False) -> None:
        self.name, self.dtype = name, dtype
        directory = home / name
        if not directory.exists():
            towers.saved(name, directory)
        model = registry.find(directory).model
        read = vision.read_config(json.loads((directory / "config.json").read_text()))
        assert read is not None
        self.cfg = encode_graphs.stored(read, quantised)
        declared = {**model.params(dtype), **encode_step.params(model, self.cfg, dtype)}
        loaded = checkpoint.load(checkpoint.open_checkpoint(directory), declared)
        self.weights = [tensor for _, tensor in tree.flatten(loaded["vision"])]
        self.partitioned = encode_graphs.partitioned(model, self.cfg, BUCKET, LIMITS, dtype)
        pixels = towers.patches(name, GRIDS, 1)
        self.inputs: dict[str, Any] = {
            "patches": torch.full((4, 64, pixels.shape[1]), 255, dtype=torch.uint8),
            "grids": torch.zeros(4, 2, dtype=torch.int32),
            "picture_rows": torch.zeros(4, 16, dtype=torch.int32),
        }
        self.places, at = list[int](), 0
        for i, (_, h, w) in enumerate(GRIDS):
            self.inputs["patches"][i, : h * w], at = towers.as_bytes(pixels[at : at + h * w]), at + h * w
            self.inputs["grids"][i] = torch.tensor([h, w])
            rows = [7 * (len(self.places) + place) % 59 + 1 for place in range(h * w // 4)]
            self.inputs["picture_rows"][i, : len(rows)] = torch.tensor(rows)
            self.places += rows

    def operands(self) -> list[torch.Tensor]:
        pool = torch.full((60, 1, 1, self.cfg.out_hidden_size), float("nan"), dtype=self.dtype)
        return [*self.weights, pool, *(self.inputs[leaf.path].clone() for leaf in self.partitioned.signature.inputs)]

    def rows(self, run: Any) -> torch.Tensor:
        """The rows that a graph writes, in the order of the pictures; nothing else of the pool is written but the null row."""
        operands = self.operands()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (finite,) = run(operands)
        assert finite.tolist() == [1, 1, 1, 1]
        pool = operands[len(self.weights)]
        assert pool[sorted({*range(1, 60)} - {*self.places})].isnan().all()
        return pool[self.places, 0, 0]

    def wanted(self) -> torch.Tensor:
        return towers.rows(self.name, towers.patches(self.name, GRIDS, 1), GRIDS)


def shipped(partitioned: PartitionedProgram, chosen: str, home: Path, platform: Platform = CPU) -> Any:
    _, made = encode_graphs.compiled(partitioned, chosen, home, platform)
    assert isinstance(made.data, bytes)
    return decode(made.data) if chosen == "ge" else acl_decode(made.data)


def interpreted(file: Any, order: str = "file") -> Any:
    def run(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return Interpreter(file, Mesh(), order=order)([operands])[0]

    return run


@pytest.mark.parametrize("chosen", BACKENDS)
@pytest.mark.parametrize("name", ["width 72", pytest.param("width 64", marks=pytest.mark.long)])
def test_graphs_write_the_rows_of_transformers(name: str, chosen: str, home: Path) -> None:
    encoder = Encoder(name, home, torch.float32)
    assert encoder.cfg.head_width == {"width 72": 80, "width 64": 64}[name]
    file = shipped(encoder.partitioned, chosen, home)
    torch.testing.assert_close(encoder.rows(interpreted(file)), encoder.wanted(), rtol=1e-4, atol=1e-4)
    if chosen == "ge":
        torch.testing.assert_close(encoder.rows(interpreted(file, "reversed-ready")), encoder.wanted(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chosen", BACKENDS)
def test_a_device_computes_the_rows_in_bfloat16(chosen: str, home: Path) -> None:
    """Twice: the pool is where it was, and what a step left is not read."""
    encoder = Encoder("width 72", home, torch.bfloat16)
    (path := home / f"device {chosen}").mkdir()
    machine = Machine(path, shipped(encoder.partitioned, chosen, home), Mesh())
    try:
        for _ in range(2):
            made, wanted = encoder.rows(lambda operands: machine([operands])[0]), encoder.wanted()
            assert (made - wanted).pow(2).mean().sqrt() < 0.02 * wanted.pow(2).mean().sqrt()
    finally:
        machine.close()


@pytest.mark.parametrize("chosen", BACKENDS)
def test_layers_of_int8_are_those_of_the_references(chosen: str, home: Path) -> None:
    encoder, floats = Encoder("width 72", home, torch.bfloat16, True), Encoder("width 72", home, torch.float32)
    assert sum(weight.dtype == torch.int8 for weight in encoder.weights) == 3 * encoder.cfg.depth
    made = encoder.rows(interpreted(shipped(encoder.partitioned, chosen, home)))
    scale = floats.wanted().pow(2).mean().sqrt()
    reference = encoder.rows(lambda operands: lower_eager(encoder.partitioned).graph(*operands))
    assert (made.float() - reference.float()).pow(2).mean().sqrt() < 0.02 * scale
    assert 0 < (made - floats.wanted()).pow(2).mean().sqrt() < 0.04 * scale


def test_heads_of_another_width_are_padded_in_the_graph(home: Path) -> None:
    """Where parameters are those of the checkpoint."""
    model, cfg = encode_graphs.published("qwen3.5-397b")
    plain = replace(cfg, stored_width=0, depth=1)
    graph = encode_graphs.partitioned(model, plain, BUCKET, LIMITS, torch.bfloat16)
    file = shipped(graph, "ge", home, Platform("ascend910_93", CANN_RELEASES[0]))
    for chip in ("ascend910_93", "ascend910b"):
        for release in CANN_RELEASES:
            check.prove(file, Platform(chip, release))
