"""lowering/cuda/compiler.py: what compiling needs is named, and a package takes the operands that a graph reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.record import record
from npucompile.lowering.artifact.graph_io import encode
from npucompile.lowering.backends.inductor import in_place
from npucompile.lowering.cuda import compiler


def graph() -> bytes:
    operands = [torch.empty(size, device="meta") for size in (2, 3, 2)]
    return encode(record(lambda a, unread, b: (a + b,), operands, FakeTensorMode(), "cuda"))


def test_unread_operands_are_left_out() -> None:
    nodes = list(compiler.graph_of_reads(graph(), [0, 2]).graph.nodes)
    assert [tuple(node.meta["val"].shape) for node in nodes if node.op == "placeholder"] == [(2,), (2,)]
    with pytest.raises(RuntimeError, match="still had"):
        compiler.graph_of_reads(graph(), [0])


@pytest.mark.parametrize(("triton", "home", "why"), [(None, "/usr/local/cuda", "needs triton"), (object(), None, "needs the CUDA toolkit")])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton: object, home: str | None, why: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
    with pytest.raises(LoweringError, match=why):
        compiler.compile_package(graph(), [0, 2], "g", tmp_path, torch.device("cuda", 0))
    assert not list(tmp_path.iterdir())


def test_inductor_knows_every_option() -> None:
    """A name that torch renames would be refused by a machine with a GPU alone."""
    from torch._inductor import config

    options = compiler.options("g", Path("/nowhere"))
    assert options["post_grad_custom_post_pass"] is in_place.write_in_place
    with config.patch(options):
        assert config.triton.cudagraphs is False
