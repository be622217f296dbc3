"""lowering/ascend/share.py: what calls compute alike is computed once, before them, and the graph computes what it did before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_bodies as gb
from torch.fx import GraphModule

from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.text import target_name
from npucompile.graphs.types import Mesh, Signature
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.share import LARGE_CONSTANT_BYTES, share

F32, I32 = gb.F32, torch.int32
X, STARTS, POOL = ((4, 8), F32), ((4,), I32), ((4, 8), F32)


def agree(graph: GraphModule, signature: Signature, runs: tuple[str, ...] = ()) -> GraphModule:
    """The shared graph; both graphs give the same bits, results and pools."""
    operands = [(torch.arange(leaf.aval.nbytes // 4) / 9).reshape(leaf.aval.shape).to(leaf.aval.dtype) for leaf in signature.operands]
    theirs_operands, ours_operands = ([t.clone() for t in operands] for _ in range(2))
    theirs = Interpreter(graph, Mesh())([theirs_operands])[0]
    shared = share(graph, signature, runs)
    ours = Interpreter(shared, Mesh())([ours_operands])[0]
    assert all(torch.equal(a, b) for a, b in zip([*ours, *ours_operands], [*theirs, *theirs_operands], strict=True))
    return shared


def ops(graph: GraphModule, body: str) -> list[str]:
    return [target_name(n.target) for n in bodies(graph)[body].graph.nodes if n.op == "call_function"]


def layers(layer: Any, count: int = 3, *, state: bool = False) -> tuple[GraphModule, Signature]:
    """A graph of calls of one body, each with the last one's result (the first with a weight) and the step's input; with a pool for all."""
    main = gb.Main()
    x = main.operand("params.x", X)
    pool = [main.operand("state.pool", POOL)] if state else []
    starts = main.operand("inputs.starts", STARTS)
    main.body("layer", layer, [X, STARTS, *([POOL] if state else [])])
    for _ in range(count):
        x, *_ = main.call("layer", x, starts, *pool)
    return main.done(x)


def angles(x: Any, starts: Any) -> tuple[Any, ...]:
    return (x.exp() * (starts.float()[:, None] + torch.arange(8, device="meta")).cos(),)


def test_what_all_layers_compute_of_a_step_is_computed_before_them() -> None:
    shared = agree(*layers(angles))
    assert [str(n.target) for n in shared.graph.nodes if n.op == "call_module"] == ["prologue", *["layer"] * 3]
    assert ops(shared, "layer") == ["aten.exp", "aten.mul.Tensor"]
    assert [op for op in ops(shared, "prologue") if "cos" in op] == ["aten.cos"]


def test_what_one_call_computes_of_a_step_alone_moves_too() -> None:
    """A layer has the same operators however many of its kind there are."""
    assert ops(agree(*layers(angles, 1)), "layer") == ["aten.exp", "aten.mul.Tensor"]


def test_what_depends_on_a_layer_stays_in_it() -> None:
    shared = agree(*layers(lambda x, starts: (x.exp() * x.sin(),)))
    assert sorted(bodies(shared)) == ["layer"]


def test_what_a_body_computes_twice_it_computes_once() -> None:
    shared = agree(*layers(lambda x, starts: (x.tanh() + x.tanh().sin() * x.tanh(),)))
    assert ops(shared, "layer").count("aten.tanh") == 1


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.int32, 2), (torch.int8, 1)])
def test_rows_that_a_product_destroys_are_not_shared(tmp_path: Any, dtype: torch.dtype, roundings: int) -> None:
    """Products with int4 weights unpack their rows in place; those with int8 weights read the same ones."""
    gb.loaded(tmp_path)
    weight = torch.empty(8, 1 if dtype == torch.int32 else 8, dtype=dtype, device="meta")

    def product(x: Any, weight: Any) -> Any:
        rows, scale = torch.ops.npu.npu_dynamic_quant(x)
        count = torch.full((1,), 4, dtype=torch.int64, device=x.device)
        scales = torch.ones(1, 8, dtype=torch.float32, device=x.device)
        int4 = {"bias": [torch.zeros(1, 8, device=x.device)], "scale": [scales.to(torch.int64).view(torch.uint64)]}
        options = {"split_item": 2, "group_type": 0, "group_list_type": 1, "output_dtype": torch.bfloat16}
        more = int4 if dtype == torch.int32 else {"scale": [scales.to(torch.bfloat16)]}
        return torch.ops.npu.npu_grouped_matmul([rows], [weight[None]], per_token_scale=[scale], group_list=count, **more, **options)[0]

    def body(x: Any, a: Any, b: Any) -> tuple[Any, ...]:
        return (product(x, a) + product(x, b),)

    main = gb.Main()
    x = main.operand("inputs.x", ((4, 8), torch.bfloat16))
    weights = [main.operand(f"params.{name}", (tuple(weight.shape), dtype)) for name in "ab"]
    main.body("layer", body, [((4, 8), torch.bfloat16), *[(tuple(weight.shape), dtype)] * 2])
    (result,) = main.call("layer", x, *weights)
    assert ops(share(*main.done(result), ()), "layer").count("npu.npu_dynamic_quant") == roundings


def test_equal_numbers_of_other_types_differ() -> None:
    shared = agree(*layers(lambda x, starts: (torch.stack([x + 1, x + 1.0]).sum(0),)))
    assert ops(shared, "layer").count("aten.add.Tensor") == 2


def writing(x: Any, starts: Any, pool: Any) -> tuple[Any, ...]:
    before = pool + starts[:, None]
    pool.add_(1.0)
    return (x + before + (pool + starts[:, None]),)


def test_reads_of_a_pool_that_is_written_are_not_shared() -> None:
    """Neither between calls nor within one."""
    shared = agree(*layers(writing, state=True))
    assert ops(shared, "layer").count("aten.add.Tensor") == 4


def scratch(x: Any, starts: Any) -> tuple[Any, ...]:
    total = starts.float()
    once = total * 2
    total.add_(1.0)
    return (x + once[:, None] + (total * 2)[:, None],)


def test_memory_that_a_body_writes_stays_in_it() -> None:
    shared = agree(*layers(scratch))
    assert ops(shared, "layer").count("aten.mul.Tensor") == 2


def test_runs_between_calls_and_bodies_of_other_names_share_too() -> None:
    """A value of the first run is not computed again by a body, nor by a run behind it."""
    main = gb.Main()
    x, starts = main.operand("params.x", X), main.operand("inputs.starts", STARTS)

    def before(starts: Any) -> tuple[Any, ...]:
        return (starts.float().cos().sin(),)

    def after(x: Any, starts: Any) -> tuple[Any, ...]:
        return (x * starts.float().cos()[:, None],)

    main.body("prologue", before, [STARTS])
    main.body("one", lambda x, s, starts: (x + s[:, None] + starts.float().cos()[:, None],), [X, ((4,), F32), STARTS])
    main.body("epilogue", after, [X, STARTS])
    (s,) = main.call("prologue", starts)
    (x,) = main.call("one", x, s, starts)
    shared = agree(*main.done(*main.call("epilogue", x, starts)), ("prologue", "epilogue"))
    every = [op for name in bodies(shared) for op in ops(shared, name)]
    assert every.count("aten.cos") == 1
    assert ops(shared, "prologue").count("aten.cos") == 1


@pytest.mark.parametrize("large", [True, False])
def test_large_constants_are_held_once(large: bool) -> None:
    side = int((LARGE_CONSTANT_BYTES / 4) ** 0.5) + (1 if large else 0)

    def masked(x: Any, starts: Any) -> tuple[Any, ...]:
        row = torch.arange(side, device="meta", dtype=F32)
        return (x + (row[None] * row[:, None])[:4, :8],)

    assert ("aten.mul.Tensor" in ops(agree(*layers(masked)), "layer")) == (not large)


def test_a_value_that_later_calls_share_waits_for_what_it_is_computed_of() -> None:
    """As the lengths of a draft: two bodies compute them of the first one's result."""
    main = gb.Main()
    x, starts = main.operand("params.x", X), main.operand("inputs.starts", STARTS)
    main.body("first", lambda x, starts: (x.sum(0).sum() + starts,), [X, STARTS])
    for name in ("second", "third"):
        main.body(name, lambda x, lengths: (x + lengths.sin().cos()[:, None],), [X, ((4,), F32)])
    (lengths,) = main.call("first", x, starts)
    (x,) = main.call("second", x, lengths)
    shared = agree(*main.done(*main.call("third", x, lengths)))
    assert [str(n.target) for n in shared.graph.nodes if n.op == "call_module"] == ["first", "between_1", "second", "third"]
    assert ops(shared, "between_1") == ["aten.sin", "aten.cos"]


def test_what_a_later_call_computes_of_a_result_is_returned_by_the_call_that_has_it() -> None:
    """As the rounding of a draft's rows: the call that writes them to the cache rounds them for its own products."""
    main = gb.Main()
    x, pool = main.operand("params.x", X), main.operand("state.pool", POOL)

    def writes(x: Any, pool: Any) -> tuple[Any, ...]:
        pool.copy_(x)
        rows = pool.sin()
        return rows, rows.cos() + 1

    main.body("writes", writes, [X, POOL])
    main.body("drafts", lambda rows: (rows.cos() * 2,), [X])
    rows, _ = main.call("writes", x, pool)
    (drafted,) = main.call("drafts", rows)
    rows, other = main.call("writes", drafted, pool)
    (drafted,) = main.call("drafts", rows)
    shared = agree(*main.done(drafted, other))
    assert [str(n.target) for n in shared.graph.nodes if n.op == "call_module"] == ["writes", "drafts", "writes", "drafts"]
    assert ops(shared, "writes") == ["aten.copy_", "aten.sin", "aten.cos", "aten.add.Tensor"]
    assert ops(shared, "drafts") == ["aten.mul.Tensor"]
