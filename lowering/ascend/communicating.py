"""The operators that exchange data between ranks: one record for each collective, with its names and what ties a call to its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...graphs.types import DISPATCH, FUSED_EXPERTS


@dataclass(frozen=True)
class TorchForm:
    """An operator of torch that communicates.

    Attributes:
        name: of its overload.
        group: position and name of the argument that has the group.
        size: position of the number of members; None where the operator does not name it.
        rank: position of the rank's number in its group, which is 0 in a file and each rank's own when it is opened; None as above.
    """

    name: str
    group: tuple[int, str]
    size: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Communicating:
    """One collective.

    Attributes:
        collective: its name in partitioned graphs.
        ge: types of GE's operators for it.
        torch: torch's operators for it.
        own_group: the group that it has for itself on NPUs; "" where it shares one with other collectives.
        exchange: what it exchanges in `own_group`, for messages.
    """

    collective: str
    ge: tuple[str, ...]
    torch: tuple[TorchForm, ...]
    own_group: str = ""
    exchange: str = ""


_EXPERTS = "expert dispatch and combine"
RECORDS = (
    Communicating("all_reduce", ("HcomAllReduce",), (TorchForm("_c10d_functional.all_reduce.default", (2, "group_name")),)),
    Communicating(
        "all_gather_into_tensor",
        ("HcomAllGather",),
        (TorchForm("_c10d_functional.all_gather_into_tensor.default", (2, "group_name"), size=1),),
    ),
    Communicating(
        "reduce_scatter_tensor",
        ("HcomReduceScatter",),
        (
            TorchForm("_c10d_functional.reduce_scatter_tensor.default", (3, "group_name"), size=2),
            TorchForm("npu.npu_mm_reduce_scatter_base.default", (2, "hcom"), size=3),
        ),
    ),
    Communicating(
        "all_to_all_single",
        ("HcomAllToAll", "HcomAllToAllV"),
        (TorchForm("_c10d_functional.all_to_all_single.default", (3, "group_name")),),
    ),
    Communicating("broadcast", ("HcomBroadcast",), (TorchForm("_c10d_functional.broadcast.default", (2, "group_name")),)),
    Communicating(
        "moe_dispatch",
        ("MoeDistributeDispatch", "MoeDistributeDispatchV2", "MoeDistributeDispatchV3"),
        (TorchForm("npu.npu_moe_distribute_dispatch_v2.default", (2, "group_ep"), size=3, rank=4),),
        DISPATCH,
        _EXPERTS,
    ),
    Communicating(
        "moe_combine",
        ("MoeDistributeCombine", "MoeDistributeCombineV2", "MoeDistributeCombineV3", "MoeDistributeCombineAddRmsNorm"),
        (
            TorchForm("npu.npu_moe_distribute_combine_v2.default", (5, "group_ep"), size=6, rank=7),
            TorchForm("npu.npu_moe_distribute_combine_add_rms_norm.default", (7, "group_ep"), size=8, rank=9),
        ),
        DISPATCH,
        _EXPERTS,
    ),
    Communicating(
        "fused_experts_w4a8",
        (),
        (TorchForm("npucompile_packages.dispatch_ffn_combine_w4a8.default", (9, "group"), size=10),),
        FUSED_EXPERTS,
        "fused experts",
    ),
)
"""All collectives that graphs for NPUs may have. No other operator exchanges data; whoever asks reads this."""

BY_TYPE: Mapping[str, Communicating] = {kind: record for record in RECORDS for kind in record.ge}
BY_TARGET: Mapping[str, Communicating] = {form.name: record for record in RECORDS for form in record.torch}
FORMS: Mapping[str, TorchForm] = {form.name: form for record in RECORDS for form in record.torch}


def ge_types(collective: str) -> tuple[str, ...]:
    """GE's operators for a collective of `RECORDS`."""
    return next(record.ge for record in RECORDS if record.collective == collective)
