"""A torchair converter for copies that only make a value contiguous: every tensor of GE is, so they are no operators there."""

from __future__ import annotations

from typing import Any

import torch

from .toolchain.harness import Torchair

_CLONE = torch.ops.aten.clone.default
_MARK = "_npucompile"


def register(ta: Torchair) -> None:
    """Makes torchair convert `clone` of a value that is not contiguous to that value; any other keeps torchair's converter.

    A value that is not contiguous is no operand, so leaving out its copy makes no result share memory with a pool.
    """
    earlier = getattr(_CLONE, "_ge_converter", None)
    if not getattr(earlier, _MARK, False):
        ta.register_converter(_CLONE)(_clone(earlier))
        setattr(_CLONE._ge_converter, _MARK, True)  # type: ignore[attr-defined]


def _clone(earlier: Any) -> Any:
    def convert(x: Any, *, memory_format: Any = None, meta_outputs: Any = None) -> Any:
        if isinstance(x.meta, torch.Tensor) and not x.meta.is_contiguous():
            return x
        return earlier(x, memory_format=memory_format, meta_outputs=meta_outputs)

    return convert
