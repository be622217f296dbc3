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


def graph(device: str = "cuda") -> bytes:
    """Two operands that are read, one between them that is not; of the last one, a pool, rows are written one after the other."""

    def fn(x: torch.Tensor, unread: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor]:
        first, second = (torch.full((1,), row, dtype=torch.int64, device=x.device) for row in (2, 0))
        pool.copy_(pool.index_put((first,), x[None]).index_put((second,), 2 * x[None]))
        return (x + 1,)

    operands = [torch.empty(size, device="meta") for size in ((2,), (3,), (4, 2))]
    return encode(record(fn, operands, FakeTensorMode(), device))


def test_unread_operands_are_left_out() -> None:
    nodes = list(compiler.graph_of_reads(graph(), [0, 2]).graph.nodes)
    assert [tuple(node.meta["val"].shape) for node in nodes if node.op == "placeholder"] == [(2,), (4, 2)]
    with pytest.raises(RuntimeError, match="still had"):
        compiler.graph_of_reads(graph(), [0])


@pytest.mark.parametrize(("triton", "home", "why"), [(None, "/usr/local/cuda", "needs triton"), (object(), None, "needs the CUDA toolkit")])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton: object, home: str | None, why: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
    with pytest.raises(LoweringError, match=why):
        compiler.compile_package(graph(), [0, 2], "g", tmp_path, torch.device("cuda", 0))
    assert not list(tmp_path.iterdir())


def test_a_package_is_made_loaded_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU, which torch's compiler, archive and loader treat alike; a GPU's kernels are the only difference."""
    monkeypatch.setattr(compiler, "lacking", lambda: None)
    package = compiler.compile_package(graph("cpu"), [0, 2], "g_test", tmp_path, torch.device("cpu"))
    assert [file.name for file in tmp_path.iterdir()] == [package.name]
    run = torch._C._aoti.AOTIModelPackageLoader(str(package), compiler.MODEL, True, 1, -1).run
    pool = torch.zeros(4, 2)
    for value in (3.0, 5.0):
        (out,) = run([torch.full((2,), value), pool])  # type: ignore[call-arg]  # the stream has a default
        assert out.tolist() == [value + 1] * 2
        assert pool.tolist() == [[2 * value] * 2, [0.0] * 2, [value] * 2, [0.0] * 2]


def test_inductor_knows_every_option() -> None:
    """A name that torch renames would be refused by a machine with a GPU alone."""
    from torch._inductor import config

    options = compiler.options("g", Path("/nowhere"))
    assert options["post_grad_custom_post_pass"] is in_place.write_in_place
    with config.patch(options):
        assert config.triton.cudagraphs is False
