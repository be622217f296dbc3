"""Turns the name of a kernel that is compiled code into an operator of graphs; packages call the code itself, not the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import PrimitiveError

NAMESPACE = "npuc_native"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

FEW_ROWS = 64
"""Most rows for which kernels of our own serve products: with more, arithmetic and not memory decides, and torch's are as good."""

TABLE: dict[str, Native] = {}
"""Every native operator by name; filled when `graphs.ops` is imported."""


class Native:
    """One operator, `torch.ops.npuc_native.<name>`: the meaning of a primitive, run by compiled code.

    An operator of its own, so that a reference graph in the same process still runs the reference.

    Args:
        name: of the operator; unique among all C functions that torch's packages call.
        schema: torch operator schema without the name.
        abstract: results on meta tensors.

    Raises:
        PrimitiveError: the name is taken.
    """

    def __init__(self, name: str, schema: str, abstract: Callable[..., Any]) -> None:
        if name in TABLE:
            raise PrimitiveError(f"native operator {name!r} is defined twice; names are unique")
        self.name = name
        self._kernel: Callable[..., Any] | None = None
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, self._call, "CPU")
        _LIBRARY.impl(name, abstract, "Meta")
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        TABLE[name] = self

    def bind(self, kernel: Callable[..., Any] | None) -> None:
        """Makes `kernel` what the operator calls on CPU tensors, for who runs a lowered graph node by node; None unbinds it."""
        self._kernel = kernel

    def _call(self, *args: Any) -> Any:
        if self._kernel is None:
            raise PrimitiveError(f"operator {NAMESPACE}.{self.name} has no kernel in this process; packages that call it bring one")
        return self._kernel(*args)
