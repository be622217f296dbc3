"""Programs of encode buckets: the rows that reach the pool, traced, on one device and on ranks, compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import towers

from npucompile.graphs import tree
from npucompile.graphs.errors import SpecError
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.types import Bucket, Limits, Mesh, Rules
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.backend import open_executable
from npucompile.lowering.backends.inductor import backend as inductor
from npucompile.lowering.lower import lower_bodies, lower_eager
from npucompile.models import checkpoint, encode_step, registry, sharding_rules, vision
from npucompile.models.step import Model

NAME = "width 72"
LIMITS = Limits(8, 9, 3, 64, picture_rows=60)
GRIDS = [(1, 6, 10), (1, 2, 4), (1, 8, 8)]
BUCKET = Bucket("encode", 4, 64)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, vision.Config, list[torch.Tensor]]:
    """A model, its tower's configuration, and its parameters in the order of a signature."""
    directory = towers.saved(NAME, tmp_path_factory.mktemp("tower"))
    model = registry.find(directory).model
    cfg = vision.read_config(json.loads((directory / "config.json").read_text()))
    assert cfg is not None
    declared = {**model.params(torch.float32), **encode_step.params(model, cfg, torch.float32)}
    loaded = checkpoint.load(checkpoint.open_checkpoint(directory), declared)
    return model, cfg, [tensor for _, tensor in tree.flatten(loaded["vision"])]


def operands() -> tuple[torch.Tensor, dict[str, torch.Tensor], list[list[int]]]:
    """A pool of NaN, inputs with white in padding, and the pool's rows of each segment."""
    pixels = towers.patches(NAME, GRIDS, 1)
    inputs = {
        "patches": torch.full((4, 64, pixels.shape[1]), 255, dtype=torch.uint8),
        "grids": torch.zeros(4, 2, dtype=torch.int32),
        "picture_rows": torch.zeros(4, 16, dtype=torch.int32),
    }
    places, at = [], 0
    for i, (_, h, w) in enumerate(GRIDS):
        inputs["patches"][i, : h * w], at = towers.as_bytes(pixels[at : at + h * w]), at + h * w
        inputs["grids"][i] = torch.tensor([h, w])
        before = sum(map(len, places))
        places.append([7 * (before + place) % 59 + 1 for place in range(h * w // 4)])
        inputs["picture_rows"][i, : h * w // 4] = torch.tensor(places[-1])
    return torch.full((60, 1, 1, 44), float("nan")), inputs, places


def check(pool: torch.Tensor, places: list[list[int]]) -> None:
    """The pool has transformers' rows, and nothing where no segment has any."""
    made = pool[[place for segment in places for place in segment], 0, 0]
    torch.testing.assert_close(made, towers.rows(NAME, towers.patches(NAME, GRIDS, 1), GRIDS), rtol=1e-4, atol=1e-4)
    others = sorted({*range(1, 60)} - {place for segment in places for place in segment})
    assert len(others) > 20
    assert pool[others].isnan().all()


def ordered(partitioned: PartitionedProgram, weights: list[torch.Tensor], pool: torch.Tensor, inputs: dict[str, Any]) -> list[torch.Tensor]:
    return [*weights, pool, *(inputs[leaf.path] for leaf in partitioned.signature.inputs)]


@pytest.fixture(scope="module")
def partitioned(read: Any) -> PartitionedProgram:
    model, cfg, _ = read
    return optimise(partition(trace(encode_step.program(model, cfg, BUCKET, LIMITS, torch.float32)), Mesh(), Rules()))


def test_the_traced_program_writes_the_rows_of_transformers_in_place(read: Any, partitioned: PartitionedProgram) -> None:
    pool, inputs, places = operands()
    assert set(bodies(partitioned.graph)) == {"vision"}, "layers are traced once"
    with torch.no_grad():
        (finite,) = lower_eager(partitioned).graph(*ordered(partitioned, read[2], pool, inputs))
    check(pool, places)
    assert finite.tolist() == [1, 1, 1, 1]


def test_a_segment_that_overflows_says_so(read: Any, partitioned: PartitionedProgram) -> None:
    pool, inputs, _ = operands()
    weights = [weight.clone() for weight in read[2]]
    place = next(i for i, leaf in enumerate(partitioned.signature.params) if leaf.path == "vision.patch.weight")
    # Two values of one patch are not nearly 0, and the sum of their products is too large.
    inputs["patches"][:, :, :2], weights[place][0, :2] = 127, 3e38
    inputs["patches"][1, 0, :2] = 255
    with torch.no_grad():
        (finite,) = lower_eager(partitioned).graph(*ordered(partitioned, weights, pool, inputs))
    assert finite.tolist() == [1, 0, 1, 1]


def test_every_rank_has_all_rows(read: Any) -> None:
    model, cfg, weights = read
    mesh = Mesh.parse("dp=2,tp=2")
    rules = sharding_rules.rules(mesh, experts=0, expert_parallel=False, tokens=BUCKET.tokens)
    split = optimise(partition(encode_step.program(model, cfg, BUCKET, LIMITS, torch.float32), mesh, rules))
    assert not split.collectives
    ranks = []
    for rank in range(mesh.size):
        pool, inputs, places = operands()
        ranks.append([each.clone() for each in ordered(split, weights, pool, {**inputs, "coords": mesh.coords(rank)})])
    with torch.no_grad():
        for _, pool in Interpreter(split.graph, mesh)(ranks):
            check(pool, places)


@pytest.mark.long
def test_the_compiled_program_writes_the_rows_of_transformers(read: Any, partitioned: PartitionedProgram, tmp_path: Path) -> None:
    file = tmp_path / "encode.pt2"
    file.write_bytes(inductor.BACKEND.compile(lower_bodies(partitioned, "inductor"), cache_dir=tmp_path, threads=1).data)
    pool, inputs, places = operands()
    (finite,) = open_executable(file, "inductor")(ordered(partitioned, read[2], pool, inputs))
    check(pool, places)
    assert finite.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("bucket", "limits", "message"),
    [
        (Bucket("encode", 1, 6), LIMITS, "encode-b1-q6: legal are encode buckets of a multiple of 4 patches"),
        (Bucket("prefill", 1, 8), LIMITS, "prefill-b1-q8: legal are encode buckets"),
        (Bucket("encode", 1, 8), Limits(8, 9, 3, 64), "encode-b1-q8, and no rows of pictures are kept; legal is at least 2"),
    ],
)
def test_what_cannot_be_encoded_is_refused(read: Any, bucket: Bucket, limits: Limits, message: str) -> None:
    model, cfg, _ = read
    with pytest.raises(SpecError, match=message):
        encode_step.program(model, cfg, bucket, limits, torch.float32)
    with pytest.raises(SpecError, match="is of the family qwen3, which has no vision tower"):
        encode_step.params(registry.find("qwen3-0.6b").model, cfg, torch.float32)
