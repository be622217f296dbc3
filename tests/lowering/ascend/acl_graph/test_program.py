"""lowering/ascend/acl_graph/program.py: segments hand on what later ones read, and ranks get their own groups and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.program import AclProgram, Value, filled, run

CPU = torch.device("cpu")


def find(name: str) -> Any:
    return lambda *args, **kwargs: name


def test_segments_say_what_they_keep_and_what_the_host_reads() -> None:
    def body(pool: Any, x: Any, pages: Any, starts: Any) -> tuple[Any, ...]:
        scaled = x.exp()
        return (ag.attend(scaled, pool, pages, (starts + 1).long()) + scaled,)

    made, _ = ag.of_body(body, **ag.ATTENTION)
    program = AclProgram(made, find, 0, {}, CPU)
    first, second = program.segments
    assert (first.lists, first.updated, second.fetched, second.updated) == ((), 0, (), 1)
    assert first.fetched == second.lists
    assert set(first.keeps) >= set(first.fetched)
    assert second.keeps == program.results
    values: list[Any] = [*range(made.operands), *[None] * (len(program.nodes) - made.operands)]
    for segment in program.segments:
        run(segment.calls, values)
        assert {i for i, value in enumerate(values) if value is not None and i >= made.operands} >= set(segment.keeps)
    # Everything else has been freed.
    kept = {*first.keeps, *second.keeps} - {i for call in second.calls for i in call.frees}
    assert {i for i, value in enumerate(values) if value is not None} == {*range(made.operands), *kept}


def exchanged(x: Any, ids: Any) -> tuple[Any, ...]:
    rows, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "dispatch", 4, 0, 8, quant_mode=0)
    product = torch.ops.npu.npu_mm_reduce_scatter_base(x, x.t(), "tp", 2, comm_mode="aiv")
    return (rows.sum() + torch.ops._c10d_functional.all_reduce(x, "sum", "tp").sum() + product.sum(),)


def test_each_rank_has_its_own_number_and_communicators() -> None:
    made, _ = ag.of_body(exchanged, inputs_x=((4, 32), ag.BF16), inputs_ids=((4, 2), ag.I32))
    program = AclProgram(made, find, 3, {"dispatch": "hccl/7", "tp": "hccl/8"}, CPU)
    (segment,) = program.segments
    dispatch = next(call for call in segment.calls if "dispatch" in call.name)
    assert dispatch.args[2:6] == ("hccl/7", 4, 3, 8)
    assert next(call for call in segment.calls if "mm_reduce" in call.name).args[2:] == ("hccl/8", 2)
    # torch finds groups by their symbols.
    assert next(call for call in segment.calls if "all_reduce" in call.name).args[1:] == ("sum", "tp")
    with pytest.raises(LoweringError, match=r"npu_moe_distribute_dispatch_v2.default\) is for group 'dispatch', and this rank has tp"):
        AclProgram(made, find, 3, {"tp": "hccl/8"}, CPU)


def test_values_and_devices_take_their_places() -> None:
    assert filled((Value(1), [Value(0), 0], {"k": (Value(0), "x")}), ["a", "b"]) == ("b", ["a", 0], {"k": ("a", "x")})
    made, _ = ag.of_body(lambda x: (torch.empty(2, dtype=ag.F32, device="meta").copy_(x),), inputs_x=((2,), ag.F32))
    (segment,) = AclProgram(made, find, 0, {}, torch.device("cpu", 5)).segments
    assert segment.calls[0].kwargs["device"] == torch.device("cpu", 5)
