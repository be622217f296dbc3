"""lowering/backends/inductor/in_place.py: chains of `index_put` become writes in place where nothing reads the old value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.types import Aval, Bucket, Leaf, Signature
from npucompile.lowering.backend import open_executable
from npucompile.lowering.backends.inductor import aoti, backend
from npucompile.lowering.backends.inductor.in_place import COPY, PUT, PUT_IN_PLACE, write_in_place
from npucompile.lowering.lower import LoweredProgram

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Pool [6, 4, 3], rows [2], values [2, 4, 3] and others -> an output, and the pool's new value."""

put = torch.ops.aten.index_put.default


def one_link(pool, rows, first, second):
    return first.sum() + pool.sum(), put(pool, [rows], first)


def two_links(pool, rows, first, second):
    return first.sum(), put(put(pool, [rows], first), [rows + 1], second)


def reads_between(pool, rows, first, second):
    """Each link depends on the value that the previous one wrote."""
    before = pool[rows]
    one = put(pool, [rows], first)
    two = put(one, [rows + 1], second + one[rows].sum())
    read = two[0].sum()
    three = put(two, [rows + 2], two[rows + 1] * 2)
    return before.sum() + read, three


def read_afterwards(pool, rows, first, second):
    one = put(pool, [rows], first)
    two = put(one, [rows + 1], second)
    return two.sum(), two


def another_shape(pool, rows, first, second):
    """Writes by token through a flat view, as for a paged pool."""
    flat = pool.view(24, 3)
    one = put(flat, [rows], first[:, 0]).view(6, 4, 3)
    read = one[1].sum()
    two = put(one.view(24, 3), [rows + 5], one[0, :2] * 2)
    return read, two.view(6, 4, 3)


def adds_up(pool, rows, first, second):
    """Accumulates into the same rows twice."""
    return first.sum(), put(put(pool, [rows * 0], first, True), [rows * 0], second, True)


def reads_the_old_pool_later(pool, rows, first, second):
    one = put(pool, [rows], first)
    two = put(one, [rows + 1], second)
    return pool[rows].sum() + two[rows].sum(), two


def reads_a_link_later(pool, rows, first, second):
    one = put(pool, [rows], first)
    two = put(one, [rows], second)
    return one[rows].sum() + two[rows].sum(), two


def reads_a_view_later(pool, rows, first, second):
    """A view taken before a write in place would see the value written after it."""
    half = pool.split(3)[0].transpose(0, 1)
    two = put(put(pool, [rows], first), [rows + 1], second)
    return half.sum(), two


def writes_what_it_replaces(pool, rows, first, second):
    one = put(pool, [rows], first)
    return first.sum(), put(one, [rows + 1], one[2:4])


def turned(pool, rows, first, second):
    """A transposed view has the same size but another order of elements."""
    one = put(pool.transpose(0, 1), [rows], first.new_ones(2, 6, 3))
    two = put(one, [rows + 1], first.new_ones(2, 6, 3) * 2)
    return first.sum(), two.transpose(0, 1)


def part(pool, rows, first, second):
    one = put(pool[2:], [rows], first)
    return first.sum(), torch.cat([pool[:2], put(one, [rows + 1], second)])


def made_of_something_else(pool, rows, first, second):
    return first.sum(), put(put(pool * 2, [rows], first), [rows + 1], second)


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 4, 3), (2, 4, 3), (2, 4, 3))
    pool, first, second = (torch.randn(shape, generator=generator) for shape in shapes)
    return [pool, torch.tensor([0, 2]), first, second]


def graph_of(step: Step) -> GraphModule:
    """A step in the form that inductor gives the pass: functional, with the new value copied into the pool at the end."""
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake")(*operands())
    pool = next(node for node in graph.graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        graph.graph.call_function(COPY, (pool, output.args[0][1]))
    output.args = (output.args[0][0],)
    graph.recompile()
    return graph


def counted(graph: GraphModule) -> tuple[int, int, int]:
    """Numbers of replacements, writes in place and copies into the pool."""
    targets = [node.target for node in graph.graph.nodes]
    return targets.count(PUT), targets.count(PUT_IN_PLACE), targets.count(COPY)


def check(step: Step, written: int, replaced: int, reshaped: bool = False) -> None:
    """Runs the pass: checks the numbers of writes in place and replacements, and that the step's results are unchanged."""
    graph, values, expected = graph_of(step), operands(), operands()
    output = graph(*expected)
    for node in graph.graph.nodes:
        if reshaped and node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    write_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert counted(graph) == (replaced, written, int(written == 0))
    assert torch.equal(graph(*values), output)
    for mine, its in zip(values, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("step", [two_links, reads_between, read_afterwards, another_shape, adds_up], ids=lambda step: step.__name__)
def test_a_chain_writes_in_place(step: Step) -> None:
    check(step, 3 if step is reads_between else 2, 0)


@pytest.mark.parametrize(
    "step",
    [reads_the_old_pool_later, reads_a_link_later, reads_a_view_later, writes_what_it_replaces, turned, part, made_of_something_else],
    ids=lambda step: step.__name__,
)
def test_a_chain_whose_old_values_are_needed_stays_as_it_is(step: Step) -> None:
    check(step, 0, 2)


def test_inductor_calls_its_views_otherwise() -> None:
    check(another_shape, 2, 0, reshaped=True)


def test_one_link_is_left_to_inductor() -> None:
    check(one_link, 0, 1)


def test_the_cases_that_stay_would_be_wrong_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npucompile.lowering.backends.inductor.in_place._free", lambda *args: True)
    for step in (reads_the_old_pool_later, reads_a_link_later, reads_a_view_later, writes_what_it_replaces):
        with pytest.raises((AssertionError, RuntimeError)):
            check(step, 2, 0)


def test_each_pool_is_judged_by_itself() -> None:
    def step(one: torch.Tensor, other: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = put(put(one, [rows], values), [rows + 1], values)
        last = put(put(other, [rows], values), [rows + 1], values)
        return other.sum(), first, last

    values = [operands()[0], operands()[0], operands()[1], operands()[2]]
    graph = make_fx(step, tracing_mode="fake")(*values)
    pools = [node for node in graph.graph.nodes if node.op == "placeholder"][:2]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        for pool, new in zip(pools, output.args[0][1:], strict=True):
            graph.graph.call_function(COPY, (pool, new))
    output.args = (output.args[0][0],)
    write_in_place(graph.graph)
    assert counted(graph) == (2, 2, 1)


# --- compiled by inductor ---

PAGES = 1 << 14  # 64 MB of pool: a copy of it cannot hide
SIGNATURE = Signature(
    params=(),
    state=(Leaf("state.pool", Aval((PAGES, 16, 64), torch.float32)),),
    inputs=(Leaf("inputs.rows", Aval((3,), torch.int64)), Leaf("inputs.values", Aval((3, 64), torch.float32))),
    outputs=(Leaf("outputs.sums", Aval((3,), torch.float32)),),
)


def paged(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three writes by token; each reads the value that the previous one wrote."""
    read = []
    for link in range(3):
        flat = put(pool.view(PAGES * 16, 64), [rows + link], values + link)
        pool = flat.view(PAGES, 16, 64)
        values = pool[rows // 16].sum(1)
        read.append(values.sum(-1))
    return torch.stack(read).sum(0), pool


def paged_operands() -> list[torch.Tensor]:
    return [torch.zeros(PAGES, 16, 64), torch.tensor([5, 40, 900]), torch.arange(192.0).view(3, 64) / 64]


SERVE = """
import sys, torch
from pathlib import Path
from npucompile.lowering.backend import open_executable
def peak():  # of this process alone: what getrusage tells is at least what the parent had
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
run = open_executable(Path(sys.argv[1]), "inductor")
pool = torch.zeros({pages}, 16, 64)
operands = (pool, torch.tensor([5, 40, 900]), torch.ones(3, 64))
before = peak()
run(operands)
print(peak() - before, bool(pool[0, 7].any()))
"""


@pytest.mark.long
def test_what_inductor_makes_of_a_chain_copies_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti.shutil, "which", lambda name: None)
    with torch.no_grad():
        graph = make_fx(paged, tracing_mode="fake")(*paged_operands())
    pool = next(node for node in graph.graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        graph.graph.call_function(COPY, (pool, output.args[0][1]))
    output.args = ((output.args[0][0],),)
    graph.recompile()
    out = tmp_path / "chain.pt2"
    lowered = LoweredProgram(Bucket("decode", 1, 1), "inductor", graph, SIGNATURE)
    out.write_bytes(backend.BACKEND.compile(lowered, cache_dir=tmp_path / "cache", threads=1).data)
    ours, theirs = paged_operands(), paged_operands()
    for _ in range(2):
        (got,), (expected,) = open_executable(out, "inductor")(ours), graph(*theirs)
        assert torch.allclose(got, expected)
    assert torch.allclose(ours[0], theirs[0])
    assert int(theirs[0].count_nonzero()) > 3 * 64
    done = subprocess.run([sys.executable, "-c", SERVE.format(pages=PAGES), str(out)], check=True, capture_output=True, text=True)
    grown, written = done.stdout.split()
    assert written == "True"
    assert int(grown) < PAGES * 16 * 64 * 4 // 2**20 // 2, f"{grown} MB more memory: the pool was copied"
