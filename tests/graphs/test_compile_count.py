"""graphs/compile_count.py: every trace in this process is counted, wherever it starts."""

from __future__ import annotations

import torch

from npucompile.graphs import compile_count
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree


def test_events_add_up() -> None:
    before = compile_count.count()
    compile_count.record("trace")
    compile_count.record("compile")
    assert compile_count.count() == before + 2


def test_tracing_and_partitioning_count() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": i["x"] + 1}, s

    before = compile_count.count()
    traced = trace(Program("toy", Bucket("decode", 2, 1), forward, {}, {}, {"x": Aval((2,), torch.float32)}))
    assert compile_count.count() == before + 1
    partitioned = partition(traced, Mesh(), Rules())
    assert compile_count.count() == before + 1, "a mesh of one device takes what was traced"
    partition(traced.program, Mesh(), Rules())
    assert compile_count.count() == before + 2
    partition(traced, Mesh.parse("dp=2,tp=2"), Rules())
    assert compile_count.count() == before + 3
    partitioned.graph(torch.ones(2))
    assert compile_count.count() == before + 3
