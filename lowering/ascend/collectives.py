"""torchair converters for functional collectives over symbolic groups; they need no process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from ...graphs.errors import LoweringError
from .ge_file import GROUPS
from .operators.collectives import REDUCTIONS
from .toolchain.harness import Torchair

_DT_INT64 = 9
# 1 would allow GE to merge neighbouring reductions of a group; torchair does not ask for it either.
_UNFUSED = 0
_MARK = "_npucompile"


def register(ta: Torchair) -> None:
    """Makes torchair convert collectives over the groups in `GROUPS`; other groups keep torchair's own converter.

    The `group` attribute holds the symbolic name until a rank loads the graph and puts its communicator's name there.
    """
    ops = torch.ops._c10d_functional
    for op, converter in (
        (ops.all_reduce.default, _all_reduce),
        (ops.all_gather_into_tensor.default, _all_gather),
        (ops.reduce_scatter_tensor.default, _reduce_scatter),
        (ops.all_to_all_single.default, _all_to_all),
        (ops.broadcast.default, _broadcast),
    ):
        # Read torchair's attribute directly: its look-up function caches for ever that an op had no converter.
        earlier = getattr(op, "_ge_converter", None)
        if not getattr(earlier, _MARK, False):
            _set(ta, op, _symbolic(ta.ge, converter, earlier))
    if not getattr(getattr(ops.wait_tensor.default, "_ge_converter", None), _MARK, False):
        _set(ta, ops.wait_tensor.default, _wait)


def _set(ta: Torchair, op: Any, converter: Callable[..., Any]) -> None:
    ta.register_converter(op)(converter)
    setattr(op._ge_converter, _MARK, True)


def _symbolic(ge: Any, converter: Callable[..., Any], earlier: Callable[..., Any] | None) -> Callable[..., Any]:
    def convert(x: Any, *args: Any, meta_outputs: Any = None) -> Any:
        *rest, group = args
        if group in GROUPS:
            return converter(ge, x, *rest, group)
        if earlier is None:
            raise LoweringError(f"a collective is over group {group!r}; legal are {', '.join(GROUPS)}")
        return earlier(x, *args)

    return convert


def _wait(x: Any, *, meta_outputs: Any = None) -> Any:
    # GE runs a reader after its inputs anyway; the Identity that torchair emits would be one more kernel.
    return x


def _all_reduce(ge: Any, x: Any, how: str, group: str) -> Any:
    return ge.HcomAllReduce(x, reduction=_reduction(how), group=group, fusion=_UNFUSED)


def _all_gather(ge: Any, x: Any, size: int, group: str) -> Any:
    return ge.HcomAllGather(x, rank_size=size, group=group)


def _reduce_scatter(ge: Any, x: Any, how: str, size: int, group: str) -> Any:
    return ge.HcomReduceScatter(x, reduction=_reduction(how), group=group, rank_size=size)


def _broadcast(ge: Any, x: Any, source: int, group: str) -> Any:
    return ge.HcomBroadcast([x], root_rank=source, group=group, fusion=_UNFUSED)[0]


def _all_to_all(ge: Any, x: Any, received: list[int], sent: list[int], group: str) -> Any:
    if len({*received, *sent}) == 1:
        return ge.HcomAllToAll(x, group=group)
    row = math.prod(x.symsize[1:])
    counts = []
    for rows in (sent, received):
        elements = [row * count for count in rows]
        counts += [elements, [0, *itertools.accumulate(elements)][:-1]]
    return ge.HcomAllToAllV(x, *(ge.Const(values, dtype=_DT_INT64) for values in counts), group=group)


def _reduction(how: str) -> str:
    if how not in REDUCTIONS:
        raise LoweringError(f"a collective reduces by {how!r}, GE by {', '.join(sorted(REDUCTIONS))}")
    return REDUCTIONS[how]
