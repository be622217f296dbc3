"""lowering/backends/null.py: the null backend reports on the partitioned graph itself, without changing, compiling or running it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Leaf, Mesh, Program, Rules, Signature
from npucompile.lowering.backend import backend

X = Leaf("inputs.x", Aval((2, 3), torch.float32))
Y = Leaf("outputs.y", Aval((2, 3), torch.float32))


def partitioned() -> PartitionedProgram:
    graph = make_fx(lambda x: (torch.ops.npuc.rms_norm.default(x, x[0], 1e-6, 0.0),), tracing_mode="fake")(torch.zeros(2, 3))
    program = Program("toy", Bucket("decode", 2, 1), lambda params, state, inputs: (inputs, state), {}, {}, {})
    return PartitionedProgram(program, graph, Signature((), (), (X,), (Y,)), Mesh((("tp", 4),)), Rules())


def test_the_graph_stays_as_it_is() -> None:
    stage = partitioned()
    before = as_text(stage.graph, "graph")
    lowered = backend("null").lower(stage)
    assert (lowered.backend, lowered.bucket, lowered.signature) == ("null", stage.program.bucket, stage.signature)
    assert as_text(lowered.graph, "graph") == before
    assert "npuc.rms_norm" in lowered.as_text(), "primitives stay whole"


def test_nothing_is_compiled_or_run() -> None:
    null = backend("null")
    assert null.suffix is None
    assert "cost and memory only" in null.runs_here()
    assert null.compiles_here() is None
    with pytest.raises(LoweringError, match="cost and memory only"):
        null.compile(null.lower(partitioned()), cache_dir=Path(), threads=0)
