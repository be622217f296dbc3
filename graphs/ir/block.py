"""Blocks: parts of a program that repeat, such as layers, traced once as a body that the graph calls.

Tracing sixty equal layers costs sixty times as much as tracing one. So the first call of each kind is traced, and every later call
with operands of the same shapes and layouts becomes one node: `call_module`, whose target is the body's name in the graph.
`flatten` (graphs/ir/flatten.py) gives the flat graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from ..errors import GraphError
from ..spmd.layout import is_dtensor, partition_context, partitioning
from .record import Recorder, record, recording

# A body is an attribute of the graph module; it must not take the name of one that every module has, such as `half`.
_ATTRIBUTES = frozenset([*dir(GraphModule), *dir(torch.nn.Module())])


@dataclass(frozen=True)
class _Body:
    """One traced kind of block: its name in the graph and what its flat results are.

    Attributes:
        results: for each what gives it its form, or the position of the operand that it is: that goes around the call.
    """

    name: str
    graph: GraphModule
    structure: pytree.TreeSpec
    results: tuple[Callable[[torch.Tensor], torch.Tensor] | int, ...]


class _Bodies:
    """The bodies of the program that is being traced."""

    def __init__(self) -> None:
        self.by_key: dict[object, _Body] = {}

    def fresh_name(self, name: str) -> str:
        taken = {body.name for body in self.by_key.values()}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken and n not in _ATTRIBUTES)


_BODIES: ContextVar[_Bodies | None] = ContextVar("bodies", default=None)


@contextmanager
def collecting(*, bodies: bool = True) -> Iterator[None]:
    """While open, `block` traces bodies, or with `bodies=False` calls its function directly; only the tracer opens it."""
    token = _BODIES.set(_Bodies() if bodies else None)
    try:
        yield
    finally:
        _BODIES.reset(token)


def block(name: str, fn: Callable[..., Any], statics: tuple[Any, ...], *operands: Any) -> Any:
    """`fn(*statics, *operands)`; in a traced graph, a call of a body that equal calls share.

    A block inside a body becomes part of that body.

    Args:
        name: name of the body in graphs.
        fn: a module-level function; it must read nothing but its arguments, or equal calls could differ.
        statics: hashable arguments that tell bodies apart: configurations, sizes.
        operands: trees of tensors.

    Returns:
        The tree of tensors that `fn` returns.

    Raises:
        GraphError: when `fn` is not a plain function, is a closure, or returns anything but a tree of tensors.
    """
    bodies, recorder = _BODIES.get(), recording()
    if bodies is None or recorder is None:
        return fn(*statics, *operands)
    if not isinstance(fn, FunctionType) or fn.__closure__:
        raise GraphError(f"block {name!r}: {fn} carries values of its own; legal is a function that takes them as statics or operands")
    flat, structure = pytree.tree_flatten(operands)
    if (context := partition_context()) is not None:
        flat = [*flat, context.coords]  # a body reads the device's coordinates as an operand too
    # 2, 2.0 and True are equal and hash alike; they are different statics.
    key = (fn, statics, repr(statics), structure, tuple(_layout(value) for value in flat))
    body = bodies.by_key.get(key)
    if body is None:
        body = _trace_body(bodies.fresh_name(name), fn, statics, flat, structure)
        bodies.by_key[key] = body
    return _call(recorder, body, flat)


def _layout(value: Any) -> object:
    """The properties of an operand that the traced body depends on."""
    local = _local(value)
    placements = (value.shape, tuple(value.placements)) if is_dtensor(value) else None
    return tuple(local.shape), tuple(local.stride()), local.dtype, placements


def _local(value: Any, what: str = "operands") -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise GraphError(f"a block's {what} are tensors, one is {value!r}; other values are statics")
    return value._local_tensor if is_dtensor(value) else value


def _trace_body(name: str, fn: Callable[..., Any], statics: tuple[Any, ...], flat: Sequence[Any], structure: pytree.TreeSpec) -> _Body:
    """Traces `fn` on fresh values, so that reading any other tensor is an error of the recorder."""
    context = partition_context()
    structures: list[tuple[pytree.TreeSpec, tuple[Callable[[torch.Tensor], torch.Tensor] | int, ...]]] = []

    def inner(*values: torch.Tensor) -> list[torch.Tensor]:
        wrapped = [_like(old)(new) for old, new in zip(flat, values, strict=True)]
        with partitioning(replace(context, coords=wrapped.pop())) if context else nullcontext():
            results, spec = pytree.tree_flatten(fn(*statics, *pytree.tree_unflatten(wrapped, structure)))
        own = [next((i for i, operand in enumerate(wrapped) if operand is value), None) for value in results]
        structures.append((spec, tuple(_like(value) if i is None else i for value, i in zip(results, own, strict=True))))
        return [_local(value, "results") for value, i in zip(results, own, strict=True) if i is None]

    with collecting(bodies=False):
        graph = record(inner, [_local(value) for value in flat], FakeTensorMode(), "cpu")
    return _Body(name, graph, *structures[0])


def _like(value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a local tensor the form of `value`: itself, or a DTensor of its layout."""
    if is_dtensor(value):
        kind, spec = type(value), value._spec
        return lambda local: kind(local, spec, requires_grad=False)
    return _itself


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _call(recorder: Recorder, body: _Body, flat: Sequence[Any]) -> Any:
    """Records the call and returns results that later nodes can read."""
    (output,) = (n for n in body.graph.graph.nodes if n.op == "output")
    values = iter(recorder.call(body.name, body.graph, [_local(value) for value in flat], [node.meta["val"] for node in output.args[0]]))
    results = [flat[form] if isinstance(form, int) else form(next(values)) for form in body.results]
    return pytree.tree_unflatten(results, body.structure)
