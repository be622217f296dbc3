"""Single GE operators in torchair's serialised form, and functions converted by torchair to whole GE files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from support import ge_bodies as gb

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.ge_file import GE_DTYPES, GeFile, messages
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.operators.call import Call, GeOp, Value, read
from npucompile.lowering.ascend.operators.table import FUNCTIONS
from npucompile.lowering.ascend.shipped import GE
from npucompile.lowering.ascend.toolchain.harness import Torchair


def message(kind: str, slots: Mapping[str, bool], results: Sequence[str], after: Sequence[str], attrs: Mapping[str, Any]) -> Any:
    """An OpDef; a slot that is False is absent."""
    op = messages().OpDef(name="op", type=kind)
    op.input.extend(f"{name}:-1" for name in after)
    for slot, there in slots.items():
        op.input.append(f"{slot}_source:0" if there else "")
        op.input_desc.add().name = slot
    for result in results:
        desc = op.output_desc.add()
        if result:
            desc.attr["_meta"].s = result.encode()
    for name, value in attrs.items():
        _set(op.attr[name], value)
    return op


def _set(attr: Any, value: Any) -> None:
    if isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, float):
        attr.f = value
    elif isinstance(value, str):
        attr.s = value.encode()
    elif isinstance(value, torch.Tensor):
        attr.t.desc.dtype = messages().DataType.Value(GE_DTYPES[value.dtype][0])
        attr.t.desc.shape.dim.extend(value.shape)
        attr.t.data = bytes(value.flatten().view(torch.uint8).tolist()) if value.numel() else b""
    else:
        kind = "b" if value and isinstance(value[0], bool) else "f" if value and isinstance(value[0], float) else "i"
        getattr(attr.list, kind).extend(value)


def call(kind: str, inputs: Mapping[str, Value | None] | None = None, results: int = 1, **attrs: Any) -> Call:
    """A call of one operator on one rank."""
    inputs = inputs or {}
    op: GeOp = read(message(kind, {slot: value is not None for slot, value in inputs.items()}, [""] * results, (), attrs))
    return Call(op, list(inputs.values()))


def run(kind: str, inputs: Mapping[str, Value | None] | None = None, **attrs: Any) -> Any:
    """The results of one operator; fails if it leaves an input or attribute unread."""
    operator = call(kind, inputs, **attrs)
    results = FUNCTIONS[kind](operator)
    operator.finish()
    return results


def i64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shipped(ta: Torchair, fn: Callable[..., Any], tensors: Sequence[torch.Tensor], states: int = 0, calls: int = 1) -> tuple[Any, GeFile]:
    """A main graph that calls a function, and its GE file; the first `states` operands are state.

    With several calls, each has its own state and takes the first result of the previous call as its first input.
    """
    main = gb.Main()
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    pools = [[main.operand(f"state.{c}.s{i}", shapes[i]) for i in range(states)] for c in range(calls)]
    inputs = [main.operand(f"inputs.x{i}", shape) for i, shape in enumerate(shapes[states:])]
    main.body("body", fn, shapes)
    for c in range(calls):
        results = main.call("body", *pools[c], *inputs)
        inputs = [results[0], *inputs[1:]] if c < calls - 1 else inputs
    graph, signature = main.done(*results)
    return graph, link(graph, signature, ta)


def flat(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def computed(ta: Torchair, kind: str, fn: Callable[..., Any], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results of a function by the GE graph that torchair makes of it, which has an operator of that type."""
    _, ge_file = shipped(ta, lambda *xs: tuple(x for x in flat(fn(*xs)) if x.numel()), operands)
    assert kind in GE.census(ge_file)
    (results,) = Interpreter(ge_file, Mesh())([[x.clone() for x in operands]])
    return list(results)


def assert_equal(results: Sequence[torch.Tensor], wanted: Any, tolerance: float = 0.0) -> None:
    for got, want in zip(results, flat(wanted), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within one rounding of the dtype."""
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.2, equal_nan=True)


def ids(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Names of a table's cases: what they begin with, and their numbers."""
    return [f"{row[0]}-{i}" for i, row in enumerate(rows)]


class Hand:
    """A ModelDef under construction, operator by operator."""

    def __init__(self) -> None:
        self.model = messages().ModelDef()
        self.model.graph.add(name="hand")

    def data(self, index: int, meta: str = "") -> str:
        return self.op("Data", {}, f"x{index}", [meta], index=index)

    def op(self, kind: str, inputs: dict[str, str], name: str, meta: Sequence[str] = ("",), after: Sequence[str] = (), **attrs: Any) -> str:
        operator = message(kind, dict.fromkeys(inputs, True), meta, after, attrs)
        operator.name = name
        operator.input[:] = [*(f"{source}:-1" for source in after), *inputs.values()]
        if kind == "Data":
            operator.input_desc.add().name = "x"
        self.model.graph[0].op.append(operator)
        return f"{name}:0"

    def done(self, *results: str, inputs: int = 1, donations: Any = (), bound: Any = (), feeds: Any = None) -> GeFile:
        graph = self.model_with(*results).SerializeToString()
        return GeFile(graph, {}, tuple(donations), tuple(bound), inputs, len(results) - len(donations), (), feeds)

    def model_with(self, *results: str) -> Any:
        """The ModelDef, complete."""
        self.op("NetOutput", {f"input{i}": tensor for i, tensor in enumerate(results)}, "NetOutput", [])
        return self.model
