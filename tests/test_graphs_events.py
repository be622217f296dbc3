"""Every trace of this process is counted, whoever asks for it."""

from __future__ import annotations

import torch

from npucompile.graphs import events
from npucompile.graphs.partition import partition
from npucompile.graphs.trace import trace
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree


def test_events_add_up() -> None:
    before = events.count()
    events.record("trace")
    events.record("compile")
    assert events.count() == before + 2


def test_tracing_and_partitioning_count() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": i["x"] + 1}, s

    before = events.count()
    traced = trace(Program("toy", Bucket("decode", 2, 1), forward, {}, {}, {"x": Aval((2,), torch.float32)}))
    assert events.count() == before + 1
    one = partition(traced, Mesh(), Rules())
    assert events.count() == before + 1, "a mesh of one device takes what was traced"
    partition(traced.program, Mesh(), Rules())
    assert events.count() == before + 2
    partition(traced, Mesh.parse("dp=2,tp=2"), Rules())
    assert events.count() == before + 3
    one.graph(torch.ones(2))
    assert events.count() == before + 3
