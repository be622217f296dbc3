"""lowering/backends/inductor/backend.py: a package computes what the eager graph computes, writes pools in place, and is reproducible."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kernels as native_kernels
from support import oracle
from support.once import made_once
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import compile_count, native_ops, ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.flatten import flatten
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.primitive import Primitive
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Leaf, Mesh, Rules, Signature
from npucompile.lowering import isa
from npucompile.lowering.artifact import graph_io
from npucompile.lowering.backend import backend, open_executable
from npucompile.lowering.backends.inductor import aoti, layouts
from npucompile.lowering.backends.inductor import backend as inductor
from npucompile.lowering.executable import check_operands
from npucompile.lowering.lower import LoweredProgram, lower_bodies
from npucompile.models.step import program as make_program

F32, I32 = torch.float32, torch.int32
BUCKET = Bucket("decode", 2, 1)
PAGES = 1 << 14  # 64 MB of pool: a copy of it cannot hide
SIGNATURE = Signature(
    params=(
        Leaf("params.w", Aval((8, 16), F32)),
        Leaf("params.taps", Aval((22, 4), F32)),
        Leaf("params.gate_up", Aval((4, 2, 24, 16), F32)),
        Leaf("params.down", Aval((4, 16, 24), F32)),
    ),
    state=(
        Leaf("state.pool", Aval((PAGES, 16, 2, 32), F32)),
        Leaf("state.slots", Aval((9, 4, 16), F32)),
        Leaf("state.windows", Aval((9, 3, 22), F32)),
        Leaf("state.states", Aval((9, 2, 5, 6), F32)),
    ),
    inputs=(
        *(Leaf(f"inputs.{name}", Aval((3,), I32)) for name in ("pages", "offsets", "read", "write", "num_computed_tokens")),
        Leaf("inputs.after", Aval((3, 2), I32)),
        Leaf("inputs.rows", Aval((6, 64), F32)),
        Leaf("inputs.knobs", Aval((3, 6), F32)),
    ),
    outputs=(
        *(Leaf("outputs.y", Aval((3, 4, 8), F32)), Leaf("outputs.sums", Aval((3,), F32))),
        *(Leaf("outputs.experts", Aval((6, 16), F32)), Leaf("outputs.delta", Aval((3, 2, 2, 5), F32))),
        Leaf("outputs.long", Aval((3, 2, 2, 5), F32)),
        *(Leaf("outputs.attention", Aval((3, 2, 2, 32), F32)), Leaf("outputs.tokens", Aval((3, 2), I32))),
        *(
            Leaf("outputs.chosen", Aval((3, 2), F32)),
            Leaf("outputs.ids", Aval((3, 2, 3), I32)),
            Leaf("outputs.values", Aval((3, 2, 3), F32)),
        ),
    ),
)
POOLS = slice(len(SIGNATURE.params), len(SIGNATURE.params) + len(SIGNATURE.state))
Rule = Callable[[Primitive], Callable[..., Any]]


def compiled(primitive: Primitive) -> Callable[..., Any]:
    """A primitive's lowering for this backend; small float32 operands select native kernels."""
    return primitive.lower_for("inductor")


def meant(primitive: Primitive) -> Callable[..., Any]:
    return primitive.rule("reference")


def step(rule: Rule, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A paged write, a recurrent state that is read and written in different slots, and each native operator on views."""
    w, taps, gate_up, down, pool, slots, windows, states, pages, offsets, read, write, num_computed_tokens, after, rows, knobs = operands
    state = torch.where((read == 0).reshape(3, 1, 1), 0.0, slots[read]) * 0.5 + 1
    written = torch.ops.aten.index_put(pool, [pages, offsets], state.reshape(3, 2, 32))
    new_slots = torch.ops.aten.index_put(slots, [write], state)
    two = torch.full_like(num_computed_tokens, 2)
    mixed, gates, x = rows.split([22, 26, 16], -1)
    scores = rule(ops.linear)(x, w)
    share, ids = scores[:, :4].softmax(-1).topk(2)
    outs = rule(ops.moe_experts)(x, share, ids.to(I32), gate_up, down)
    raw, gate_sizes, last = mixed.view(3, 2, 22), (knobs[0, :2], knobs[1, :2]), after[:, 1:]
    mixed, windows = rule(ops.causal_conv)(raw, taps, windows, read, after, num_computed_tokens, two, F32)
    q, k, v = mixed.split([6, 6, 10], -1)
    g, beta = (half.sigmoid().view(3, 2, 2) for half in gates[:, :4].chunk(2, -1))
    heads = q.view(3, 2, 1, 6), k.view(3, 2, 1, 6), v.view(3, 2, 2, 5)
    delta, states = rule(ops.gated_delta)(*heads, -g, beta, states, read, after, num_computed_tokens, two)
    # Prefills, which keep one state a row.
    prefilled, windows = rule(ops.causal_conv)(raw, taps, windows, read, last, num_computed_tokens, two, F32)
    tokens_of_heads = prefilled.view(3, 2, 1, 22), gates[:, 4:8].view(3, 2, 1, 4), *gate_sizes
    long, states = rule(ops.chunk_gated_delta)(*tokens_of_heads, states, read, last, num_computed_tokens, two, 1e-6, 2)
    attended = rule(ops.paged_attention)(rows.view(3, 2, 2, 32), written, written, pages[:, None], num_computed_tokens, two, 0.2)
    temperature, top_k, top_p, min_p, *uniform = knobs.unbind(-1)
    logits = scores.view(3, 2, 8)
    tokens = rule(ops.sample)(logits, temperature, top_k.to(I32), top_p, min_p, torch.stack(uniform).t())
    logprobs = rule(ops.token_logprobs)(logits, tokens, read, 3)
    y, sums = torch.nn.functional.linear(state, w), written[pages].sum((1, 2, 3))
    return y, sums, outs, delta, long, attended, tokens, *logprobs, written, new_slots, windows, states


def lowered() -> GraphModule:
    """`step` as a lowered graph: flat, returning outputs only; donated pools that no kernel writes are copied into at the end."""
    with torch.no_grad():
        fakes = (torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in SIGNATURE.operands)
        graph = make_fx(partial(step, compiled), tracing_mode="fake")(*fakes)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    results, count = output.args[0], len(SIGNATURE.outputs)
    with graph.graph.inserting_before(output):
        for pool, new in zip(placeholders[POOLS], results[count:], strict=True):
            if new is not pool:
                graph.graph.call_function(torch.ops.aten.copy_.default, (pool, new))
    output.args = (tuple(results[:count]),)
    graph.recompile()
    layouts.choose(graph)
    return graph


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(leaf.aval.shape, generator=generator) if "pool" not in leaf.name else torch.zeros(leaf.aval.shape)
        for leaf in SIGNATURE.operands
    ]
    slots = {"pages": [5, 1, 70], "offsets": [0, 15, 3], "read": [2, 0, 8], "write": [3, 1, 7], "num_computed_tokens": [4, 0, 12]}
    slots["after"] = [[2, 4], [1, 5], [6, 7]]
    knobs = {"temperature": [0.7, 0.0, 1.5], "top_k": [3, 0, 0], "top_p": [0.9, 1.0, 1.0], "min_p": [0.0, 0.0, 0.1]}
    uniform = [[0.3, 0.0, 0.9], [0.6, 0.0, 0.5]]
    for i, leaf in enumerate(SIGNATURE.operands):
        if leaf.aval.dtype == I32:
            values[i] = torch.tensor(slots[leaf.path], dtype=I32)
        elif leaf.name == "inputs.knobs":
            values[i] = torch.tensor([*knobs.values(), *uniform]).t().contiguous()
    return values


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # For two small graphs, precompiling headers costs more than it saves.
        patch.setattr(aoti.shutil, "which", lambda name: None)
        cache = native_kernels.keep_native(tmp_path_factory.mktemp("cache"))
        (cache / "bodies").symlink_to(made_once(tmp_path_factory, "bodies", lambda to: None))
        yield cache


def compile_graph(graph: GraphModule, cache_dir: Path, threads: int) -> bytes:
    return inductor.BACKEND.compile(LoweredProgram(BUCKET, "inductor", graph, SIGNATURE), cache_dir=cache_dir, threads=threads).data


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    def make(folder: Path) -> None:
        graph = lowered()
        before, text, counted = graph_io.encode(graph), as_text(graph, "step"), compile_count.count()
        (folder / "step.pt2").write_bytes(compile_graph(graph, cache_dir, 1))
        assert (graph_io.encode(graph), as_text(graph, "step")) == (before, text), "compiling must not change the graph it is given"
        assert compile_count.count() == counted + 1

    return made_once(tmp_path_factory, "package", make) / "step.pt2"


def test_a_package_computes_what_the_eager_graph_computes(package: Path) -> None:
    executable = open_executable(package, "inductor")
    assert executable.backend == "inductor"
    ours, theirs = operands(), operands()
    check_operands(ours, SIGNATURE)
    for _ in range(3):
        results = step(meant, *theirs)
        count = len(SIGNATURE.outputs)
        theirs[POOLS] = results[count:]
        for got, want, leaf in zip(executable(ours), results[:count], SIGNATURE.outputs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda output, name=leaf.name: f"{name}: {output}")
    for got, want, leaf in zip(ours, theirs, SIGNATURE.operands, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda output, name=leaf.name: f"{name}: {output}")
    for pool, before in zip(ours[POOLS], operands()[POOLS], strict=True):
        assert not torch.equal(pool, before), "every pool was written in place"
    assert len(executable(ours)) == len(SIGNATURE.outputs)
    assert len(ours) == len(SIGNATURE.operands), "the list of operands is left as it was"


SERVE = """
import sys, torch
from npucompile.graphs import compile_count as events
from npucompile.lowering.backend import open_executable
from pathlib import Path
def peak():  # of this process alone: what getrusage tells is at least what the parent had
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
run = open_executable(Path(sys.argv[1]), "inductor")
pool = torch.zeros({pages}, 16, 2, 32)
operands = torch.load(sys.argv[2])
operands[{at}] = pool
before = peak()
run(operands)
print(peak() - before)
print([m for m in ("torch._inductor.compile_fx", "torch._inductor.codecache", "torch._dynamo.convert_frame") if m in sys.modules])
print(events.count(), pool[5, 0].sum().item() != 0)
print(2.0 ** -1060 / 2 > 0, bool((torch.tensor([2.0 ** -140]) / 2 > 0).all()))
"""


def test_serving_copies_no_pool_loads_no_compiler_and_flushes_no_small_number(package: Path, tmp_path: Path) -> None:
    """A library that flushes denormals does so in the thread that loads it, which only a fresh process can show."""
    at = POOLS.start
    torch.save([value if i != at else None for i, value in enumerate(operands())], tmp_path / "operands.pt")
    code = SERVE.format(pages=PAGES, at=at)
    command = [sys.executable, "-c", code, str(package), str(tmp_path / "operands.pt")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert int(output[0]) < PAGES * 16 * 2 * 32 * 4 // 2**20 // 2, f"{output[0]} MB more memory: the pool was copied"
    assert output[1:] == ["[]", "0 True", "True True"]


def test_a_package_calls_every_native_operator() -> None:
    """The package compiled here covers all native operators of plain weights, so that the tests of its results do too."""
    targets = {node.target for node in lowered().graph.nodes}
    assert {native.op for name, native in native_ops.TABLE.items() if name.startswith("npuc_") and not native.packed} <= targets


def test_compiling_again_gives_the_same_bytes(package: Path, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "again.pt2").write_bytes(compile_graph(lowered(), cache_dir, 1))
    assert (tmp_path / "again.pt2").read_bytes() == package.read_bytes()
    assert list((cache_dir / "graphs").iterdir()) == []


def test_no_path_of_this_machine_is_in_a_package(package: Path, cache_dir: Path) -> None:
    data = package.read_bytes()
    assert str(cache_dir).encode() not in data
    assert str((cache_dir / "native").resolve()).encode() not in data
    assert sys.prefix.encode() not in data


def test_a_package_is_what_torch_calls_one(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        assert archive.read("graph/archive_format") == b"pt2"
        assert [n for n in archive.namelist() if n.startswith("graph/data/aotinductor/model/") and n.endswith(".so")]


def test_a_damaged_package_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt2").write_bytes(package.read_bytes()[:-2000])
    with pytest.raises(LoweringError, match=r"cut.pt2 is not a package torch \S+ can load"):
        open_executable(tmp_path / "cut.pt2", "inductor")


# --- graphs of bodies ---


def called(kinds: str) -> LoweredProgram:
    """A decode step of a small hybrid model, a letter a layer, lowered to calls of bodies."""
    model = oracle.build(oracle.settings(kinds)).model
    program = make_program(model, Bucket("decode", 2, 1), oracle.LIMITS, F32)
    return lower_bodies(optimise(partition(trace(program), Mesh(), Rules())), "inductor")


def test_the_number_of_compiles_is_that_of_kinds_of_layers() -> None:
    short, long = (inductor.BACKEND.parts(called(kinds), threads=1) for kinds in ("lflf", "lflflflf"))
    assert [len(graph.parts) for graph in (short, long)] == [4, 4], "before the layers, two kinds of layers, after them"
    assert len(long.data) > len(short.data)
    assert short.parts[1:3] == long.parts[1:3], "a layer is compiled for any number of them"


@pytest.mark.parametrize(("layers", "one"), [(1, True), (2, True), (4, False)])
def test_few_layers_are_one_body(layers: int, one: bool) -> None:
    graph = called("lf" * layers).graph
    assert inductor.compiles_sooner_as_one(graph) is one


@pytest.fixture(scope="module")
def stitched(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    def make(folder: Path) -> None:
        (folder / "stitched.pt2").write_bytes(inductor.BACKEND.compile(called("lflf"), cache_dir=cache_dir, threads=1).data)

    return made_once(tmp_path_factory, "stitched", make) / "stitched.pt2"


@pytest.mark.long
def test_stitched_bodies_compute_bit_for_bit_what_one_graph_does(stitched: Path, cache_dir: Path, tmp_path: Path) -> None:
    graph = called("lflf")
    whole = replace(graph, graph=flatten(graph.graph))
    (tmp_path / "whole.pt2").write_bytes(inductor.BACKEND.compile(whole, cache_dir=cache_dir, threads=1).data)
    r = torch.Generator().manual_seed(1)
    values = [
        torch.randn(leaf.aval.shape, generator=r) * 0.3 if leaf.aval.dtype == F32 else torch.ones(leaf.aval.shape, dtype=leaf.aval.dtype)
        for leaf in graph.signature.operands
    ]
    ours, theirs = [value.clone() for value in values], [value.clone() for value in values]
    runs = open_executable(stitched, "inductor"), open_executable(tmp_path / "whole.pt2", "inductor")
    for _ in range(3):
        for pair in zip([*runs[0](ours), *ours], [*runs[1](theirs), *theirs], strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=0)
    state = slice(len(graph.signature.params), len(graph.signature.params) + len(graph.signature.state))
    assert all(not torch.equal(pool, before) for pool, before in zip(ours[state], values[state], strict=True)), "pools are written in place"


def test_other_threads_work_while_stitched_bodies_run(stitched: Path) -> None:
    """A server's event loop is one of them; torch's loader itself keeps Python's lock."""
    values = [torch.ones(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in called("lflf").signature.operands]
    executable, turns, stop = open_executable(stitched, "inductor"), 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(1e-5)

    thread, usual = threading.Thread(target=count, daemon=True), sys.getswitchinterval()
    thread.start()
    # Nobody takes the lock from this thread: the other one has a turn only where the lock is given away.
    sys.setswitchinterval(1000)
    try:
        during, until = 0, time.monotonic() + 20
        # Many tries, because a step of this model is shorter than what a busy machine may need to wake a thread.
        while during < 10 and time.monotonic() < until:
            before = turns
            outputs = executable(values)
            during += turns > before
            del outputs  # gives the lock away too
    finally:
        sys.setswitchinterval(usual)
        stop.set()
        thread.join()
    assert during == 10


def test_a_body_that_is_compiled_is_not_compiled_again(
    stitched: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor.BACKEND.compile(called("lflf"), cache_dir=cache_dir, threads=1)
    monkeypatch.setattr(aoti, "compile_files", None)
    again = inductor.BACKEND.compile(called("lflf"), cache_dir=cache_dir, threads=1)
    assert again.data == stitched.read_bytes()
    monkeypatch.setattr(aoti, "compile_files", counting := Counting())
    with pytest.raises(LoweringError, match="decode-b2-q1: RuntimeError: no more"):
        inductor.BACKEND.compile(called("lflf"), cache_dir=tmp_path, threads=1)
    assert counting.calls == 1


class Counting:
    """Stands for the compiler, counts its calls and refuses."""

    calls = 0

    def __call__(self, *args: object, **kwargs: object) -> dict[str, bytes]:
        self.calls += 1
        raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("program.bin", lambda data: data[:-4]),
        ("program.bin", lambda data: b"\0\0\0\0" + data[4:]),
        ("body0.bin", lambda data: data[: len(data) // 2]),
        ("body1.bin", None),
    ],
)
def test_a_package_whose_program_or_body_is_damaged_is_refused(stitched: Path, tmp_path: Path, name: str, change: object) -> None:
    out = tmp_path / "damaged.pt2"
    with zipfile.ZipFile(stitched) as before, zipfile.ZipFile(out, "w") as after:
        for entry in before.infolist():
            data = before.read(entry)
            if entry.filename.endswith(name):
                data = change(data) if change else before.read(entry.filename.replace("body1", "body0"))  # type: ignore[operator]
            after.writestr(entry, data)
    with pytest.raises(LoweringError, match=r"damaged.pt2 is not a package torch \S+ can load"):
        open_executable(out, "inductor")


# --- refusals, without a compile ---


def refused(graph: GraphModule, tmp_path: Path) -> str:
    with pytest.raises(LoweringError) as caught:
        compile_graph(graph, tmp_path, 0)
    return str(caught.value)


def test_a_collective_is_refused_by_name(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    operand = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (operand,)),))
    output = refused(GraphModule(torch.nn.Module(), graph), tmp_path)
    assert "legal" in output or "runs operators of aten" in output
    assert "_c10d_functional.wait_tensor.default" in output


def test_a_failed_compile_says_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> dict[str, bytes]:
        raise RuntimeError("C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1: error: 'x' was not declared\n")

    monkeypatch.setattr(aoti, "compile_files", fails)
    assert f"{BUCKET.name}: RuntimeError: a.cpp:1: error: 'x' was not declared" in refused(lowered(), tmp_path)


def test_an_operator_without_a_c_function_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = b'{"nodes": [{"name": "buf0", "node": {"target": "aten::poisson"}}]}'
    files = {"g.wrapper.so": b"", "g.wrapper_metadata.json": b"{}", "g.wrapper.json": nodes}
    monkeypatch.setattr(aoti, "compile_files", lambda *args, **kwargs: files)
    assert f"{BUCKET.name}: aten::poisson cannot be called from a body" in refused(lowered(), tmp_path)
    assert not (tmp_path / "bodies").exists()


def test_a_missing_compiler_is_refused_before_anything_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, str]:
        raise LoweringError("needs a C++ compiler")

    monkeypatch.setattr(aoti, "compiler", none)
    counted = compile_count.count()
    assert refused(lowered(), tmp_path) == "needs a C++ compiler"
    assert compile_count.count() == counted
    assert backend("inductor").compiles_here() == "needs a C++ compiler"


def test_options_name_what_decides_the_bytes() -> None:
    options = backend("inductor").options(3)
    assert options["threads"] == 3
    assert options["instruction_set"] == isa.in_use()
    assert options["cpu_features"] == list(backend("inductor").cpu_features())
    assert backend("inductor").options(0) != options


@pytest.mark.skipif(not isa.has("avx512"), reason="needs levels to tell apart")
def test_packages_of_one_level_are_not_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = ["avx2", "avx512", *(["avx512_bf16"] if isa.has("avx512_bf16") else [])]
    keys = []
    for level in levels:
        monkeypatch.setattr(isa, "ISA", level)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", isa.variables()["ATEN_CPU_CAPABILITY"])
        options = backend("inductor").options(1)
        keys.append((options["instruction_set"], *(feature in options["cpu_features"] for feature in ("avx512_f", "avx512_vnni"))))
    assert keys == [("avx2", False, False), ("avx512", True, False), ("avx512_bf16", True, True)][: len(levels)]


def test_packing_does_not_depend_on_order() -> None:
    files = {"b.so": b"b", "a.json": b"a"}
    assert inductor.package(files) == inductor.package(dict(reversed(files.items())))
    assert inductor.package(files) != inductor.package({**files, "a.json": b"b"})
