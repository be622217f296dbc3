"""Turns a function into its graph over fake tensors, at a price that thousands of operands can pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._mode_utils import no_dispatch

from .errors import GraphError


def fake(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, device: str = "cpu") -> torch.Tensor:
    """What `torch.empty_strided` gives in the FakeTensorMode that is open, at a tenth of its time.

    Args:
        stride: that of a contiguous tensor when nothing is said.

    Raises:
        GraphError: no FakeTensorMode is open.
    """
    mode = detect_fake_mode()
    if mode is None:
        raise GraphError("a fake tensor outside of a FakeTensorMode; legal is inside of one")
    with no_dispatch():
        if stride is None:
            held = torch.empty(shape, dtype=dtype, device="meta")
        else:
            held = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, held, torch.device(device))


def graph_of(fn: Callable[..., Any], operands: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of a function of fake tensors: `make_fx`, less its record of the Python functions that nodes come from.

    Nothing here reads that record, and it costs a tenth of the time.
    """
    graph: GraphModule = make_fx(fn, tracing_mode="real", _disable_torch_fn_metadata_mode=True)(*operands)
    return graph
