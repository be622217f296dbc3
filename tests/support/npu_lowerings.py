"""Lowerings of primitives for NPUs: traced, run with the CPU kernels of the operators, and converted by torchair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.primitive import Primitive
from npucompile.lowering.ascend import converters
from npucompile.lowering.ascend.operators import elementwise, shapes
from npucompile.lowering.ascend.operators.table import KERNELS
from npucompile.lowering.ascend.toolchain.harness import Torchair

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# Operators that every graph has, and those that compute or move single elements.
PLAIN = {"Const", "Data", "NetOutput"} | {kind for each in (*elementwise.OPERATORS, *shapes.OPERATORS) for kind in each.ge}
Results = list[torch.Tensor]


def everything(results: Results) -> Results:
    return results


@dataclass(frozen=True)
class Example:
    """Operands, a mask of the results that are defined, and how far results may be from the reference's."""

    args: tuple[Any, ...]
    live: Callable[[Results], Results] = everything
    tolerance: Mapping[torch.dtype, float] | None = None


def flat(results: Any) -> Results:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def tensors(args: tuple[Any, ...]) -> Results:
    return [a for a in args if isinstance(a, torch.Tensor)]


def traced(
    primitive: Primitive,
    args: tuple[Any, ...],
    finish: Callable[..., Any] = lambda operands, results: tuple(results),
    features: frozenset[str] = frozenset(),
    **options: Any,
) -> tuple[GraphModule, Results]:
    """The lowering, traced on fake operands under a FakeTensorMode; the graph returns `finish(operands, results)`."""

    def run(*operands: torch.Tensor) -> Any:
        rest = iter(operands)
        values = [next(rest) if isinstance(a, torch.Tensor) else a for a in args]
        return finish(values, flat(primitive.lower_for("npu", features)(*values)))

    fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") for a in tensors(args)]
    return make_fx(run, **options)(*fakes), fakes


class OnCpu(Interpreter):
    """Runs a graph traced on meta tensors, with the CPU kernels of NPU operators."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
        return KERNELS.get(str(target), target)(*args, **kwargs)


def executed(primitive: Primitive, args: tuple[Any, ...], *features: str) -> Results:
    with FakeTensorMode():
        graph, _ = traced(primitive, args, features=frozenset(features))
    # Cloned, because int4 kernels overwrite their rows.
    return list(OnCpu(graph).run(*(a.clone() for a in tensors(args))))


def reference(primitive: Primitive, args: tuple[Any, ...]) -> Results:
    return flat(primitive.rule("reference")(*args))


def close(got: Results, want: Results, tolerance: float) -> None:
    assert all(not t.is_floating_point() or t.isfinite().all() for t in want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare(primitive: Primitive, example: Example, dtype: torch.dtype, *features: str) -> None:
    """Fails where the lowering's defined results are not the reference's."""
    got, want = executed(primitive, example.args, *features), reference(primitive, example.args)
    close(example.live(got), example.live(want), (example.tolerance or TOLERANCE)[dtype])


def copied_back(primitive: Primitive) -> Callable[..., Any]:
    """Ends a graph as the `ge` backend does: new pools are copied into their operands and are not returned."""

    def finish(operands: list[Any], results: Results) -> tuple[torch.Tensor, ...]:
        for operand, result in primitive.donates:
            if results[result] is not operands[operand]:
                operands[operand].copy_(results[result])
        donated = {result for _, result in primitive.donates}
        return tuple(result for i, result in enumerate(results) if i not in donated)

    return finish


def converted(ta: Torchair, primitive: Primitive, args: tuple[Any, ...], features: frozenset[str] = frozenset()) -> Any:
    """The lowering, converted by torchair: its runner."""
    converters.register(ta)
    with FakeTensorMode():
        graph, fakes = traced(primitive, args, copied_back(primitive), features, decomposition_table=ta.decompositions)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        assert not [n for n in graph.graph.nodes if n.op == "get_attr"], "a constant of the trace has no value on the device"
        return ta.get_compiler(ta.CompilerConfig())(graph, fakes).runner


def special(runner: Any) -> list[str]:
    """Types of a converted lowering's operators, in order, without those of single elements."""
    return [op.type for op in runner.graph.op if op.type not in PLAIN]
