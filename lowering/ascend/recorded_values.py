"""Answers operators of a recorded body with the values that were recorded, for a converter that runs the body again to learn its shapes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from ...graphs.ir.alias import owner

# What torchair runs in place of an operator (npu_fx_compiler.py of torch_npu 2.13.0, _view_to_reshape).
_ALIASES = {torch.ops.aten.view.default: (torch.ops.aten.reshape.default,)}


class RecordedValues(TorchDispatchMode):
    """While open, an operator of the body on values of the body gives the value that was recorded. Any other operator runs, as does one
    whose result shares memory with an operand of the body: torchair asks for that.

    FakeTensorMode takes about 0.3 ms to work out what `meta["val"]` of a node already is.

    Args:
        gm: recorded (graphs/ir/record.py); each node of an operator has its values in `meta["val"]`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Keys have ids of tensors, which must stay alive.
        self._body, self._values = gm, dict[Hashable, Any]()
        self._sharing = set[Hashable]()
        self._equal: dict[int, tuple[torch.Tensor, int]] = {}
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta:
                args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                keys = [self._key(target, args, kwargs) for target in (node.target, *_ALIASES.get(node.target, ()))]
                self._values |= dict.fromkeys(keys, node.meta["val"])
                self._sharing.update(keys if owner(node).op == "placeholder" else ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs)
        value = self._values.get(key)
        if value is not None and key not in self._sharing:
            return value
        result = func(*args, **kwargs)
        if value is not None:
            several = isinstance(value, tuple | list)
            for actual, recorded in zip(result, value, strict=True) if several else ((result, value),):
                self._equal[id(actual)] = actual, id(recorded)
        return result

    def _key(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Hashable:
        return target, self._identity(args), self._identity(sorted(kwargs.items()))

    def _identity(self, argument: Any) -> Hashable:
        """A tensor as itself, a sequence by its elements, and anything else with its type: 1, 1.0 and True are different arguments."""
        if isinstance(argument, torch.Tensor):
            number = id(argument)
            return "tensor", self._equal[number][1] if number in self._equal else number
        if isinstance(argument, tuple | list):
            return tuple(map(self._identity, argument))
        return type(argument), argument
