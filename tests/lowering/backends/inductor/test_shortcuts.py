"""lowering/backends/inductor/shortcuts.py: with what torch's compiler leaves out it writes code of the same calls and of as many loops.

That packages compute what their graphs do is tested where they are run, test_backend.py and test_in_place.py.
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from support import oracle
from torch._inductor import codecache, sizevars
from torch._inductor.codegen import common

from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Bucket, Mesh, Rules
from npucompile.lowering.backends.inductor import aoti, native, shortcuts, sizes
from npucompile.lowering.lower import LoweredProgram, lower_inline
from npucompile.models.step import program

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

LIMITS = oracle.LIMITS.with_bitmasks(8, 97)


def lowered(bucket: Bucket) -> LoweredProgram:
    """Linear and full attention, with states that native operators and copies write."""
    model = oracle.build(oracle.settings("lf")).model
    return lower_inline(optimise(partition(trace(program(model, bucket, LIMITS, torch.bfloat16)), Mesh(), Rules())), "inductor")


@pytest.mark.parametrize("bucket", [Bucket("decode", 1, 1), pytest.param(Bucket("prefill", 1, 32), marks=pytest.mark.long)], ids=str)
def test_the_code_has_the_calls_and_as_many_loops_as_without_them(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "archive", lambda *_: tmp_path / "native" / "kernels.a")
    both = [lowered(each) for each in sizes.samples(bucket)]
    of = [sizes.sizes_of(each.bucket, each.signature) for each in both]
    written: list[str] = []

    def write(graph: object, *texts: object, **_: object) -> None:
        written.append("\n".join(map(str, texts)))
        raise KeyboardInterrupt

    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", write)
    for taken in (shortcuts.taken, nullcontext):
        monkeypatch.setattr(shortcuts, "taken", taken)
        graph, operands = sizes.with_values([each.graph for each in both], of)
        with suppress(KeyboardInterrupt):
            aoti.compile_files(graph, operands, "g_1", cache_dir=tmp_path, threads=0)
    with_less, with_all = written
    for what in (r"CHECK\((aoti_torch_cpu_npuc_\w+)\(", r'extern "C" +void +(?:cpp_fused)\w*_(\d+)\('):
        found = re.findall(what, with_less)
        assert len(found) > 5
        assert found == re.findall(what, with_all)


@pytest.mark.parametrize("index", ["2 * (x + 3) - x", "s * (x + 1) * 4 + (x + y) * 3", "(x + s) * (y + 2)"])
def test_a_stride_of_a_polynomial_needs_no_simplest_form(index: str) -> None:
    expression, x = sizevars.sympy.sympify(index), sizevars.sympy.Symbol("x")
    own = sizevars.stride_at.__wrapped__(expression, x)
    with shortcuts.taken():
        assert sizevars.sympy.expand(own - sizevars.stride_at.__wrapped__(expression, x)) == 0


def test_torch_is_as_it_was_afterwards() -> None:
    from torch._inductor import compile_fx

    def places() -> tuple[object, ...]:
        return compile_fx.aot_export_module, compile_fx._unlift_graph, sizevars.sympy, common.DtypePropagationOpsHandler

    before = places()
    with suppress(RuntimeError), shortcuts.taken():
        assert all(ours is not theirs for ours, theirs in zip(places(), before, strict=True))
        raise RuntimeError
    assert places() == before
