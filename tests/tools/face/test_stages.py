"""tools/face/stages.py: pure functions, none of which is a language model, go through all stages and compute what torch computes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import npucompile as npc
from npucompile.graphs.errors import GraphError, InvariantError, LoweringError, PartitionError, SpecError
from npucompile.lowering.ascend.cost.estimate import StepCost
from npucompile.tools.face import stages
from npucompile.tools.progress import Progress

F32, BF16 = torch.float32, torch.bfloat16
CPU_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


pytestmark = pytest.mark.usefixtures("face_home")


def two_products(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    return npc.constrain(torch.nn.functional.silu(x @ w["up"]) @ w["down"], "rows", None)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
    return {"out": scores @ v, "mean": (scores.mean(-2), [q.sum()])}


def heat(u: torch.Tensor, rate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three explicit steps of the heat equation on a ring."""
    for _ in range(3):
        u = u + rate * (torch.roll(u, 1, 0) - 2 * u + torch.roll(u, -1, 0))
    return u, u.pow(2).sum()


@dataclass(frozen=True)
class Case:
    function: Any
    avals: tuple[Any, ...]


def products(dtype: torch.dtype = F32) -> Case:
    weights = {"up": npc.Aval((32, 64), dtype, (None, "ffn")), "down": npc.Aval((64, 32), dtype, ("ffn", None))}
    return Case(two_products, (npc.Aval((8, 32), dtype, ("rows", None)), weights))


HEADS = npc.Aval((2, 5, 8), F32, ("heads", None, None))
CASES = {
    "two products": products(),
    "attention": Case(attention, (HEADS, HEADS, HEADS)),
    "heat": Case(heat, (npc.Aval((16,), F32), npc.Aval((), F32))),
}


def drawn(avals: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    flat, structure = torch.utils._pytree.tree_flatten(avals)
    return torch.utils._pytree.tree_unflatten([torch.randn(a.shape, generator=generator).to(a.dtype) for a in flat], structure)


def same(got: Any, want: Any, **tolerance: float) -> None:
    """Equal structures, and values within a tolerance."""
    ours, theirs = (torch.utils._pytree.tree_flatten(each) for each in (got, want))
    assert ours[1] == theirs[1]
    for left, right in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(left, right, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_function_is_torchs_on_this_machine(name: str) -> None:
    case = CASES[name]
    compiled = npc.trace(case.function, *case.avals).partition().lower("cpu").compile(progress=False)
    arguments = drawn(case.avals)
    want = case.function(*arguments)
    same(compiled(*arguments), want, **CPU_TOLERANCE)
    same(compiled(*arguments), want, **CPU_TOLERANCE)
    same(compiled.emulate(*arguments), want, **CPU_TOLERANCE)


@pytest.mark.parametrize("backend", ["ge", "aclgraph"])
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ({"tp": 2}, {"ffn": "tp"}),
        ({"x": 2}, {"ffn": "x"}),
        ({"x": 2, "y": 2}, {"rows": "x", "ffn": "y"}),
        ({"y": 2, "x": 2}, {"rows": ("y", "x")}),
        ({"dp": 2, "tp": 2}, {"rows": "dp", "ffn": "tp"}),
    ],
    ids=str,
)
def test_all_ranks_of_a_mesh_together_are_torchs(mesh: Any, rules: Any, backend: str) -> None:
    """The graph that ships, as torchair converted it, on all ranks in this process."""
    case = products()
    parts = npc.trace(case.function, *case.avals).partition(mesh, rules)
    compiled = parts.lower("ascend-a3", backend=backend).compile(progress=False)
    arguments = drawn(case.avals)
    same(compiled.emulate(*arguments), case.function(*arguments), **CPU_TOLERANCE)
    assert ("all_reduce" in str(parts.collectives)) == ("ffn" in rules)


@pytest.mark.parametrize(("mesh", "rules"), [({"x": 4}, {"c": "x"}), ({"x": 2, "y": 2}, {"c": ("x", "y")})], ids=str)
def test_values_change_their_layout_on_npus(mesh: Any, rules: Any) -> None:
    """From rows to columns, addends to a part each, and parts to the whole; each result comes back whole."""

    def moved(x: torch.Tensor, w: torch.Tensor) -> Any:
        columns = npc.constrain(torch.nn.functional.silu(x) * 2, None, "c")
        rows = npc.constrain(columns @ w, "c", None)
        return columns, rows, npc.constrain(rows, None, None)

    avals = npc.Aval((8, 16), F32, ("c", None)), npc.Aval((16, 4), F32, ("c", None))
    parts, arguments = npc.trace(moved, *avals).partition(mesh, rules), drawn(avals)
    same(parts.lower("ascend-a3").compile(progress=False).emulate(*arguments), moved(*arguments), **CPU_TOLERANCE)
    assert len({kind for kind, _, _ in parts.collectives}) > 1


# Of bfloat16 every bit: it rounds where torch rounds.
@pytest.mark.parametrize(
    ("case", "placed", "target", "backend", "tolerance"),
    [
        (CASES["two products"], ({},), "ascend-a2", "ge", CPU_TOLERANCE),
        (CASES["attention"], ({},), "ascend-a2", "ge", CPU_TOLERANCE),
        (products(BF16), ({"x": 2}, {"rows": "x"}), "ascend-a3", "ge", {"rtol": 0, "atol": 0}),
        (products(), ({"x": 4}, {"ffn": "x"}), "cpu", "eager", CPU_TOLERANCE),
    ],
    ids=["products", "attention", "bfloat16", "ranks of this machine"],
)
def test_it_runs_what_torch_runs(case: Case, placed: Any, target: str, backend: str, tolerance: Any) -> None:
    compiled = npc.trace(case.function, *case.avals).partition(*placed).lower(target).compile(progress=False)
    assert compiled.graph.backend == backend
    arguments = drawn(case.avals)
    same(compiled.emulate(*arguments), case.function(*arguments), **tolerance)


def test_every_stage_says_what_it_is_and_costs() -> None:
    case = products()
    traced = npc.trace(case.function, *case.avals)
    parts = traced.partition("x=2,y=2", {"ffn": "y"})
    lowered = parts.lower("ascend-a3")
    compiled = lowered.compile(progress=False)
    titles = [str(stage.as_text()).splitlines()[0] for stage in (traced, parts, lowered, compiled)]
    assert titles == [
        "two_products traced",
        "two_products partitioned over mesh x=2,y=2",
        "two_products lowered for ge",
        "two_products compiled for ascend-a3",
    ]
    assert repr(parts) == "<Partitioned: two_products partitioned over mesh x=2,y=2>"
    assert "HcomAllReduce" in compiled.as_text()
    # Two products of 8 x 32 x 64 and an activation; a rank of two has half of them, and one all-reduce.
    assert traced.cost().flops == 2 * (2 * 8 * 32 * 64) + 8 * 64
    assert parts.cost().flops == 2 * (2 * 8 * 32 * 32) + 8 * 32 + 8 * 32
    assert traced.memory().inputs_bytes == 4 * (8 * 32 + 2 * 32 * 64)
    assert compiled.cost() == lowered.cost()
    assert compiled.memory() == lowered.memory()


def test_the_time_of_a_step_is_estimated_for_npus() -> None:
    """More work takes longer, and a collective is in the time."""
    small, large = ((npc.Aval((n, n), BF16), npc.Aval((n, n), BF16, (None, "c"))) for n in (256, 8192))

    def time(avals: Any, mesh: str = "", rules: Any = None) -> StepCost:
        parts = npc.trace(lambda a, b: npc.constrain(a @ b, None, None), *avals).partition(mesh, rules)
        return parts.lower("ascend-a3").compile(progress=False).estimate()

    one = time(large)
    assert time(small).step_ms < one.step_ms
    # 2 n^3 operations at 354 TFLOP/s.
    assert 3.1 < one.step_ms < 10
    two = time(large, "x=2", {"c": "x"})
    assert two.parts_ms["matrix"] < one.parts_ms["matrix"]
    assert one.parts_ms["collectives"] == 0 < two.parts_ms["collectives"]


def test_a_stage_can_become_several(tmp_path: Path) -> None:
    """Stages are values: a layout or a target does not change what the next one is made of."""
    case = products()
    traced = npc.trace(case.function, *case.avals)
    text = traced.as_text()
    arguments = drawn(case.avals)
    split = traced.partition({"x": 2}, {"rows": "x"})
    whole = traced.partition()
    for parts in (split, whole, split):
        same(parts.lower("ascend-a3").compile(progress=False).emulate(*arguments), case.function(*arguments), **CPU_TOLERANCE)
    assert traced.as_text() == text


def test_a_result_that_is_one_tensor_on_one_device_may_be_two_on_several() -> None:
    """`constrain` returns its operand where nothing is split."""

    def both(x: torch.Tensor) -> Any:
        y = x * 2
        return y, npc.constrain(y, None, None)

    aval = npc.Aval((4, 4), F32, ("rows", None))
    traced = npc.trace(both, aval)
    split, whole = traced.partition({"x": 2}, {"rows": "x"}), traced.partition()
    x = torch.randn(4, 4)
    for parts in (whole, split):
        same(parts.lower().compile(progress=False).emulate(x), both(x))


def test_a_bar_shows_how_far_a_compile_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(stages, "Progress", lambda quiet: Progress(shown, quiet=quiet))
    lowered = npc.trace(torch.sigmoid, npc.Aval((4,), F32)).partition().lower("cpu", backend="eager")
    lowered.compile(progress=False)
    assert shown.getvalue() == ""
    lowered.compile()
    assert shown.getvalue().startswith("compile sigmoid (eager) 1/1 graph")


# --- refusals, one clear error each ---


@pytest.mark.parametrize("target", ["", "ascend-a3"])
def test_what_is_not_compiled_is_not_called(target: str) -> None:
    x, traced = torch.zeros(4), npc.trace(torch.sigmoid, npc.Aval((4,), F32))
    legal = r"legal is to call what \.partition\(mesh, rules\)\.lower\(target\)\.compile\(\) returns"
    with pytest.raises(SpecError, match=rf"sigmoid is traced and not compiled; {legal}"):
        traced(x)
    with pytest.raises(SpecError, match="sigmoid is partitioned and not compiled"):
        traced.partition()(x)
    with pytest.raises(SpecError, match="sigmoid is lowered and not compiled"):
        traced.partition().lower(target or "cpu")(x)


@pytest.mark.parametrize(
    ("mesh", "rules", "error", "message"),
    [
        ({"x": 2}, {"ffn": "y"}, SpecError, r"rule 'ffn' -> 'y': mesh x=2 has no such axis; legal are x"),
        ("", {"ffn": "y"}, SpecError, r"rule 'ffn' -> 'y': mesh 1 has no such axis; legal are none"),
        ({"x": 0}, {}, SpecError, r"mesh 'x=0': 'x=0' is not NAME=SIZE with SIZE at least 1"),
        ({"x": 2.5}, {}, SpecError, r"'x=2.5' is not NAME=SIZE"),
        ({"x": 3}, {"ffn": "x"}, PartitionError, r"inputs\.w\.up: axis 'ffn' of size 64 does not divide by 3 \(\('x',\) of mesh x=3\)"),
        ({"x": 2}, {"ffn": "x", "rows": "x"}, PartitionError, r"axes .* both map to mesh axis 'x'|mplicit redistribution"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: Any, rules: Any, error: type[Exception], message: str) -> None:
    case = products()
    with pytest.raises(error, match=message):
        npc.trace(case.function, *case.avals).partition(mesh, rules)


@pytest.mark.parametrize(
    ("target", "ranks", "options", "message"),
    [
        ("cpu", 65, {}, "mesh x=65 has 65 ranks and cpu at most 64"),
        ("ascend-a4", 2, {}, r"target 'ascend-a4' is not known \(did you mean ascend-a3\?\); legal are cpu, ascend-a3, ascend-a2"),
        ("cpu", 2, {"backend": "ge"}, r"backend 'ge' does not build for cpu and mesh x=2; legal are eager, null"),
        ("cpu", 2, {"backend": "inductor"}, r"backend 'inductor' does not build for cpu and mesh x=2; legal are eager, null"),
        ("ascend-a3", 2, {"cann": "7.0"}, r"CANN release '7\.0' is not known; legal are"),
        ("cpu", 2, {"cann": "9.1"}, r"cann is '9\.1' .* for cpu; legal is neither: it is no NPU"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: str, ranks: int, options: Any, message: str) -> None:
    parts = npc.trace(torch.sigmoid, npc.Aval((4,), F32)).partition({"x": ranks})
    with pytest.raises(SpecError, match=message):
        parts.lower(target, **options)


def test_what_no_process_runs_is_not_called() -> None:
    traced, x = npc.trace(torch.sigmoid, npc.Aval((4,), F32)), torch.zeros(4)
    with pytest.raises(SpecError, match=r"sigmoid is compiled for cpu and the 2 ranks of mesh x=2; .* \.emulate\(\.\.\.\) runs all here"):
        traced.partition({"x": 2}).lower("cpu").compile(progress=False)(x)
    with pytest.raises(LoweringError, match="backend null compiles nothing"):
        traced.partition().lower("cpu", backend="null").compile(progress=False)
    with pytest.raises(SpecError, match=r"sigmoid is compiled for cpu by eager; times are estimated for ascend-a3, ascend-a2"):
        traced.partition().lower("cpu", backend="eager").compile(progress=False).estimate()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: 3, GraphError, r"output \(the whole\) is 3; every leaf is a tensor"),
        (lambda x: x * x.sum().item(), GraphError, r"meta tensors: it reads a value; legal is what shapes alone decide"),
        (lambda x: x if x.sum() > 0 else -x, GraphError, r"meta tensors: it reads a value"),
        (lambda x: x.add_(1), InvariantError, r"nothing_is_mutated: .* calls aten\.add_\.Tensor, which writes its operand"),
        (lambda x: x + torch.randn(4), InvariantError, r"aten\.randn\.default, which draws random numbers; they are inputs"),
        (lambda x: x + CLOSED_OVER, GraphError, r"neither an operand nor computed from one"),
    ],
    ids=["no tensor", "item", "if", "in place", "random", "closed over"],
)
def test_a_function_that_is_not_pure_is_refused(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        npc.trace(function, npc.Aval((4,), F32)).partition()


CLOSED_OVER = torch.ones(4)


def test_an_operator_that_a_target_lacks_is_named() -> None:
    lowered = npc.trace(torch.relu, npc.Aval((4, 4), F32)).partition().lower("ascend-a3")
    with pytest.raises(LoweringError, match=r"CANN 9\.1 on ascend910_93 does not take 1 operators .* \(Relu\): the table knows no"):
        lowered.compile(progress=False)


def test_errors_of_the_function_itself_are_its_own() -> None:
    with pytest.raises(RuntimeError, match="a and b must have same reduction dim"):
        npc.trace(lambda a, b: a @ b, npc.Aval((2, 3), F32), npc.Aval((2, 3), F32))
