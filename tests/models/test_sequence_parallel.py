"""models/sequence_parallel.py: the stream is split by tokens where the layout says so, and whole where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.models import sequence_parallel

F32, I32 = torch.float32, torch.int32
M, K, V = 6, 8, 12
SPLIT = Rules.of({"tokens": "tp", "vocab": "tp", "ffn": "tp"})
WHOLE = Rules.of({"vocab": "tp", "ffn": "tp"})
PARAMS = {"table": Aval((V, M), F32, ("vocab", None)), "down": Aval((M, K), F32, (None, "ffn")), "up": Aval((K, M), F32, ("ffn", None))}
Step = Callable[[Tree, torch.Tensor], Any]


def partitioned(step: Step, tokens: int, mesh: str, rules: Rules) -> PartitionedProgram:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": step(p, i["ids"])}, s

    program = Program("toy", Bucket("decode", tokens, 1), forward, PARAMS, {}, {"ids": Aval((tokens,), I32)})
    return partition(program, Mesh.parse(mesh), rules)


def drawn() -> Tree:
    r = torch.Generator().manual_seed(0)
    return {name: torch.randn(aval.shape, generator=r) for name, aval in PARAMS.items()}


def run(step: Step, ids: torch.Tensor, mesh: str, rules: Rules) -> list[torch.Tensor]:
    program, tp = partitioned(step, len(ids), mesh, rules), Mesh.parse(mesh).axis("tp")
    p = drawn()
    shards = zip(p["table"].chunk(tp), p["down"].chunk(tp, 1), p["up"].chunk(tp), strict=True)
    operands = [[*own, ids, torch.tensor([0, rank], dtype=I32)] for rank, own in enumerate(shards)]
    return [y for (y,) in Interpreter(program.graph, program.mesh)(operands)]


def stream(p: Tree, ids: torch.Tensor) -> torch.Tensor:
    """Embed, a column- and a row-parallel product with their residual, and all rows of the sum."""
    x = sequence_parallel.embed(ids, p["table"])
    hidden = torch.relu(ops.linear(sequence_parallel.whole(x, len(ids)), p["up"]))
    return sequence_parallel.whole(x + sequence_parallel.project(hidden, p["down"], "ffn"), len(ids))


def expected(ids: torch.Tensor) -> torch.Tensor:
    p = drawn()
    x = p["table"][ids.long()]
    return x + torch.relu(x @ p["up"].t()) @ p["down"].t()


IDS = torch.tensor([11, 0, 5, 6, 3, 9, 2], dtype=I32)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_alone_it_is_what_it_says(tokens: int) -> None:
    torch.testing.assert_close(stream(drawn(), IDS[:tokens]), expected(IDS[:tokens]))
    assert sequence_parallel.padded(tokens) == tokens


@pytest.mark.parametrize(("mesh", "tokens"), [("tp=2", 4), ("tp=2", 7), ("tp=2", 1), ("tp=4", 4), ("tp=4", 7), ("tp=4", 5), ("tp=4", 2)])
@pytest.mark.parametrize("rules", [SPLIT, WHOLE], ids=["split", "whole"])
def test_every_device_ends_with_the_same_rows(mesh: str, tokens: int, rules: Rules) -> None:
    """Among them the first and the last row of each device's part of the vocabulary."""
    for rows in run(stream, IDS[:tokens], mesh, rules):
        torch.testing.assert_close(rows, expected(IDS[:tokens]))


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        (SPLIT, ["reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_into_tensor"]),
        (WHOLE, ["all_reduce", "all_reduce"]),
    ],
    ids=["split", "whole"],
)
def test_sums_are_scattered_where_the_stream_is_split(rules: Rules, kinds: list[str]) -> None:
    assert [kind for kind, *_ in partitioned(stream, 6, "tp=2", rules).collectives] == kinds


@pytest.mark.parametrize(("mesh", "tokens", "rows"), [("tp=2", 7, 8), ("tp=4", 5, 8), ("tp=4", 8, 8), ("tp=4", 1, 4)])
def test_the_stream_has_as_many_rows_as_it_takes(mesh: str, tokens: int, rows: int) -> None:
    shapes: list[tuple[int, ...]] = []

    def step(p: Tree, ids: torch.Tensor) -> torch.Tensor:
        x = sequence_parallel.embed(ids, p["table"])
        shapes.append((sequence_parallel.padded(tokens), *x.shape, *sequence_parallel.whole(x, tokens).shape))
        return sequence_parallel.whole(x, tokens)

    partitioned(step, tokens, mesh, SPLIT)
    assert shapes == [(rows, rows, M, tokens, M)]


def test_a_table_that_is_not_split_is_read_whole() -> None:
    """Each device has all rows of it, and takes its share of the tokens."""
    rules = Rules.of({"tokens": "tp"})

    def step(p: Tree, ids: torch.Tensor) -> torch.Tensor:
        return sequence_parallel.whole(sequence_parallel.embed(ids, p["table"]), len(ids))

    program = partitioned(step, 5, "tp=2", rules)
    assert [kind for kind, *_ in program.collectives] == ["all_gather_into_tensor"]
    p = drawn()
    operands = [[p["table"], p["down"], p["up"], IDS[:5], torch.tensor([0, rank], dtype=I32)] for rank in range(2)]
    for (rows,) in Interpreter(program.graph, program.mesh)(operands):
        assert torch.equal(rows, p["table"][IDS[:5].long()])
