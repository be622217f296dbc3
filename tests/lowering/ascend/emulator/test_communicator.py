"""lowering/ascend/emulator/communicator.py: members get each other's inputs, or learn who runs something else or does not come."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support import ge_calls as gc
from support.emulated import on_ranks

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.communicator import ROOM_BYTES, EmulatedCommunicator
from npucompile.lowering.ascend.operators.call import GeOp, read

PAIR = Mesh.parse("tp=2")
GRAPH = b"g" * 16


def operator(name: str = "op", kind: str = "HcomAllGather") -> GeOp:
    message = gc.message(kind, {"x": True}, [""], (), {})
    message.name = name
    return read(message)


def exchanged(mesh: Mesh, inputs: Sequence[Sequence[torch.Tensor]], group: str = "world", times: int = 1) -> list[Any]:
    def work(rank: int, groups: Mapping[str, Any]) -> Any:
        communicator = EmulatedCommunicator("comm", groups[group], rank)
        return communicator.ranks, [communicator.exchange(operator(), inputs[rank], GRAPH) for _ in range(times)]

    return on_ranks(mesh, work)


@pytest.mark.parametrize("elements", [3, ROOM_BYTES // 4 - 2, ROOM_BYTES + 1])
def test_every_member_gets_the_inputs_of_all(elements: int) -> None:
    inputs = [[gc.draw(elements, seed=rank), gc.i32(rank, 7), torch.zeros(0)] for rank in range(3)]
    for ranks, rounds in exchanged(Mesh.parse("dp=3"), inputs, times=2):
        assert ranks == (0, 1, 2)
        for members in rounds:
            for got, sent in zip(members, inputs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


def test_members_are_those_of_the_group() -> None:
    answers = exchanged(Mesh.parse("dp=2,tp=2"), [[gc.i32(rank)] for rank in range(4)], group="dp")
    assert [ranks for ranks, _ in answers] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [x.item() for members in answers[3][1] for (x,) in members] == [1, 3]


def test_a_group_of_one_needs_nobody() -> None:
    communicator = EmulatedCommunicator("comm", None, 5)
    x = torch.zeros(3)
    assert (communicator.ranks, communicator.exchange(operator(), [x], GRAPH)) == ((5,), [[x]])


FAULTS: dict[str, tuple[list[Any], str]] = {
    "another operator": (
        [(operator("a"), GRAPH, 2), (operator("b", "HcomAllReduce"), GRAPH, 2)],
        r"a \(HcomAllGather\).* b \(HcomAllReduce\)",
    ),
    "another shape": ([(operator(), GRAPH, 2), (operator(), GRAPH, 3)], r"of f32\[2\], 8 bytes.* of f32\[3\], 12 bytes"),
    "another graph": ([(operator(), GRAPH, 2), (operator(), b"h" * 16, 2)], "of graph 67676767.*of graph 68686868"),
    "another size of the second message": ([(operator(), GRAPH, 500_000), (operator(), GRAPH, 2)], r"f32\[500000\].*f32\[2\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_members_that_run_something_else_are_named(fault: str) -> None:
    calls, message = FAULTS[fault]

    def work(rank: int, groups: Mapping[str, Any]) -> Any:
        op, graph, size = calls[rank]
        EmulatedCommunicator("emulated/tp/0", groups["tp"], rank).exchange(op, [torch.zeros(size)], graph)

    error, other = on_ranks(PAIR, work)
    assert isinstance(error, LoweringError)
    assert isinstance(other, LoweringError)
    assert re.search(rf"'emulated/tp/0' .* rank 0 runs exchange 1, .*{message}", str(error))
    assert "rank 1 runs exchange 1" in str(error)


def test_a_member_that_skipped_an_exchange_is_named() -> None:
    def work(rank: int, groups: Mapping[str, Any]) -> Any:
        communicator = EmulatedCommunicator("comm", groups["tp"], rank)
        communicator._count += rank
        communicator.exchange(operator(), [torch.zeros(1)], GRAPH)

    assert "rank 0 runs exchange 1, op (HcomAllGather) of f32[1]" in str(error := on_ranks(PAIR, work)[0])
    assert "rank 1 runs exchange 2" in str(error)


def test_who_does_not_come_is_named_while_waiting_and_after() -> None:
    looked = threading.Event()

    def work(rank: int, groups: Mapping[str, Any]) -> Any:
        communicator = EmulatedCommunicator("emulated/dp/0", groups["dp"], rank)
        if rank == 2:
            looked.wait(30)
            return None
        ends: list[str] = []

        def run() -> None:
            try:
                communicator.exchange(operator(), [torch.zeros(1)], GRAPH)
            except LoweringError as error:
                ends.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        wanted = "waits for ranks [2]" if rank == 0 else "waits for rank 0"
        while wanted not in (state := communicator.waiting() or ""):
            thread.join(0.01)
        thread.join()
        looked.set()
        return state, ends[0]

    whom = ("ranks [2] of [0, 1, 2]", "rank 0, which collects the inputs of ranks [0, 1, 2]")
    for (state, end), missing in zip(on_ranks(Mesh.parse("dp=3"), work, timeout_s=2)[:2], whom, strict=True):
        assert state == f"op (HcomAllGather) on communicator 'emulated/dp/0' waits for {missing}"
        assert end.startswith(state)
        assert "did not answer" in end
