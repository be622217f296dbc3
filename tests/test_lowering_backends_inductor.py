"""A package computes what the eager graph computes, writes state in place without copying it, and is the same bytes again."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import events
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Leaf, Signature
from npucompile.lowering import aoti, serial
from npucompile.lowering.backend import backend
from npucompile.lowering.backends import inductor
from npucompile.lowering.executable import check_operands, load_compiled

F32, I32 = torch.float32, torch.int32
PAGES = 1 << 14  # 64 MB of pool: a copy of it cannot hide
SIGNATURE = Signature(
    params=(Leaf("params.w", Aval((8, 16), F32)),),
    state=(Leaf("state.pool", Aval((PAGES, 16, 2, 32), F32)), Leaf("state.slots", Aval((9, 4, 16), F32))),
    inputs=tuple(Leaf(f"inputs.{name}", Aval((3,), I32)) for name in ("pages", "offsets", "read", "write")),
    outputs=(Leaf("outputs.y", Aval((3, 4, 8), F32)), Leaf("outputs.sums", Aval((3,), F32))),
)


def step(w: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A paged write and a recurrent state, read by one index and written by another."""
    pages, offsets, read, write = inputs
    state = torch.where((read == 0).reshape(3, 1, 1), 0.0, slots[read]) * 0.5 + 1
    written = torch.ops.aten.index_put(pool, [pages, offsets], state.reshape(3, 2, 32))
    return torch.nn.functional.linear(state, w), written[pages].sum((1, 2, 3)), written, torch.ops.aten.index_put(slots, [write], state)


def lowered() -> GraphModule:
    """`step` as a lowered graph: flat, outputs only, copies into the donated pools at the end."""
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake")(*(torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in SIGNATURE.operands))
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    results = output.args[0]
    with graph.graph.inserting_before(output):
        for pool, new in zip(placeholders[1:3], results[2:], strict=True):
            graph.graph.call_function(torch.ops.aten.copy_.default, (pool, new))
    output.args = (tuple(results[:2]),)
    graph.recompile()
    return graph


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randn(9, 4, 16, generator=generator)
    inputs = [torch.tensor(v, dtype=I32) for v in ([5, 1, 70], [0, 15, 3], [2, 0, 8], [3, 1, 7])]
    return [torch.randn(8, 16, generator=generator), torch.zeros(PAGES, 16, 2, 32), slots, *inputs]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # Precompiling headers costs more than it saves for two small graphs.
        patch.setattr(aoti.shutil, "which", lambda name: None)
        yield tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    out, graph = tmp_path_factory.mktemp("out") / "step.pt2", lowered()
    before, text, counted = serial.encode(graph), as_text(graph, "step"), events.count()
    inductor.compile_package(graph, SIGNATURE, out, cache_dir=cache_dir, threads=1)
    assert (serial.encode(graph), as_text(graph, "step")) == (before, text), "compiling must not change the graph it is given"
    assert events.count() == counted + 1
    return out


def test_a_package_computes_what_the_eager_graph_computes(package: Path) -> None:
    executable = load_compiled(package, "inductor")
    assert executable.backend == "inductor"
    graph, ours, theirs = lowered(), operands(), operands()
    check_operands(ours, SIGNATURE)
    for _ in range(3):
        for got, want in zip(executable(ours), graph(*theirs), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert ours[1][5, 0].abs().sum() > 0, "the pool was written in place"
    assert len(executable(ours)) == len(SIGNATURE.outputs)
    assert len(ours) == len(SIGNATURE.operands), "the list of operands is left as it was"


SERVE = """
import sys, torch
from npucompile.graphs import events
from npucompile.lowering.executable import load_compiled
from pathlib import Path
def peak():  # of this process alone: what getrusage tells is at least what the parent had
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
run = load_compiled(Path(sys.argv[1]), "inductor")
pool = torch.zeros({pages}, 16, 2, 32)
inputs = [torch.tensor(v, dtype=torch.int32) for v in ([5, 1, 70], [0, 15, 3], [2, 0, 8], [3, 1, 7])]
given = (torch.ones(8, 16), pool, torch.ones(9, 4, 16), *inputs)
before = peak()
run(given)
print(peak() - before)
print([m for m in ("torch._inductor.compile_fx", "torch._inductor.codecache", "torch._dynamo.convert_frame") if m in sys.modules])
print(events.count(), pool[5, 0].sum().item() != 0)
"""


def test_serving_copies_no_pool_and_loads_no_compiler(package: Path) -> None:
    code = SERVE.format(pages=PAGES)
    said = subprocess.run([sys.executable, "-c", code, str(package)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert int(said[0]) < PAGES * 16 * 2 * 32 * 4 // 2**20 // 2, f"{said[0]} MB more memory: the pool was copied"
    assert said[1:] == ["[]", "0 True"]


def test_compiling_again_gives_the_same_bytes(package: Path, cache_dir: Path, tmp_path: Path) -> None:
    inductor.compile_package(lowered(), SIGNATURE, tmp_path / "again.pt2", cache_dir=cache_dir, threads=1)
    assert (tmp_path / "again.pt2").read_bytes() == package.read_bytes()
    assert list((cache_dir / "graphs").iterdir()) == []


def test_no_path_of_this_machine_is_in_a_package(package: Path, cache_dir: Path) -> None:
    data = package.read_bytes()
    assert str(cache_dir).encode() not in data
    assert sys.prefix.encode() not in data


def test_a_package_is_what_torch_calls_one(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        assert archive.read("graph/archive_format") == b"pt2"
        assert [n for n in archive.namelist() if n.startswith("graph/data/aotinductor/model/") and n.endswith(".so")]


def test_a_damaged_package_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt2").write_bytes(package.read_bytes()[:-2000])
    with pytest.raises(LoweringError, match=r"cut.pt2 is not a package torch \S+ can load"):
        load_compiled(tmp_path / "cut.pt2", "inductor")


# --- refusals, without a compile ---


def refused(graph: GraphModule, tmp_path: Path) -> str:
    with pytest.raises(LoweringError) as caught:
        inductor.compile_package(graph, SIGNATURE, tmp_path / "out.pt2", cache_dir=tmp_path, threads=0)
    assert not (tmp_path / "out.pt2").exists()
    return str(caught.value)


def test_a_collective_is_refused_by_name(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    operand = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (operand,)),))
    said = refused(GraphModule(torch.nn.Module(), graph), tmp_path)
    assert "legal" in said or "runs operators of aten" in said
    assert "_c10d_functional.wait_tensor.default" in said


def test_a_failed_compile_says_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> dict[str, bytes]:
        raise RuntimeError("C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1: error: 'x' was not declared\n")

    monkeypatch.setattr(aoti, "compile_files", fails)
    assert "out.pt2: RuntimeError: a.cpp:1: error: 'x' was not declared" in refused(lowered(), tmp_path)


def test_a_missing_compiler_is_refused_before_anything_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, str]:
        raise LoweringError("needs a C++ compiler")

    monkeypatch.setattr(aoti, "compiler", none)
    counted = events.count()
    assert refused(lowered(), tmp_path) == "needs a C++ compiler"
    assert events.count() == counted
    with pytest.raises(LoweringError, match="needs a C"):
        backend("inductor").check_target()


def test_options_name_what_decides_the_bytes() -> None:
    options = backend("inductor").options(3)
    assert options["threads"] == 3
    assert options["instruction_set"] == aoti.instruction_set()
    assert options["cpu_features"] == list(backend("inductor").cpu_features())
    assert backend("inductor").options(0) != options


def test_packing_does_not_depend_on_order() -> None:
    files = {"b.so": b"b", "a.json": b"a"}
    assert inductor.package(files) == inductor.package(dict(reversed(files.items())))
    assert inductor.package(files) != inductor.package({**files, "a.json": b"b"})
