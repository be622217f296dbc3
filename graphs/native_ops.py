"""Native operators: graph nodes for compiled kernels, which packages call directly without going through torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .errors import PrimitiveError

NAMESPACE = "npuc_native"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

PANELS: Mapping[torch.dtype, str] = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Dtype of rows and weights that are multiplied as they are -> layout of the weights."""

TABLE: dict[str, Native] = {}
"""Every native operator by name; filled when `graphs.ops` is imported."""


class Packed(NamedTuple):
    """Says of an operator that it reads its weights in a packed layout, which is made of parameters when they are loaded.

    The operands keep the shape and dtype of the weights as they are stored: the layout is one of their bytes alone.
    """

    operands: tuple[int, ...]
    """Positions of the weights among the operands: all are packed, or none."""

    kind: str
    """Layout: a name of `lowering.backends.inductor.layouts.KINDS`."""

    plain: Callable[..., Any]
    """The same operation on weights as they are stored, for those that are no parameters or have other readers."""

    worth: bool = True
    """Whether it is a reason to pack; else it only reads what others want packed."""


class Native:
    """One operator, `torch.ops.npuc_native.<name>`: the meaning of a primitive, run by compiled code.

    It is separate from the primitive's own operator, so that a reference graph in the same process still runs the reference.

    Args:
        name: of the operator; unique among all C functions that torch's packages call.
        schema: torch operator schema without the name.
        abstract: results on meta tensors.
        packed: where it takes packed weights.

    Raises:
        PrimitiveError: the name is taken.
    """

    def __init__(self, name: str, schema: str, abstract: Callable[..., Any], packed: Packed | None = None) -> None:
        if name in TABLE:
            raise PrimitiveError(f"native operator {name!r} is defined twice; names are unique")
        self.name, self.packed = name, packed
        self._kernel: Callable[..., Any] | None = None
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, self._call, "CPU")
        _LIBRARY.impl(name, abstract, "Meta")
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        TABLE[name] = self

    def bind(self, kernel: Callable[..., Any] | None) -> None:
        """Makes the operator call `kernel` on CPU tensors, so that a lowered graph can run node by node; None unbinds it."""
        self._kernel = kernel

    def _call(self, *args: Any) -> Any:
        if self._kernel is None:
            raise PrimitiveError(f"operator {NAMESPACE}.{self.name} has no kernel in this process; packages that call it bring one")
        return self._kernel(*args)


def native_of(target: object) -> Native | None:
    """The native operator that an FX node calls, or None for any other target."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    return TABLE.get(target._schema.name.split("::")[1])
