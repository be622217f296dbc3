"""lowering/ascend/acl_graph/executable.py: replays first, then reads, then updates; derived values come from parameters and constants."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.lowering.ascend.acl_graph.executable import AclExecutable
from npucompile.lowering.ascend.acl_graph.program import AclProgram, GraphSegment, run
from npucompile.lowering.ascend.acl_graph.updates import Updates
from npucompile.lowering.switches import CAPTURE, OVERLAP


class Recorder:
    """An engine that writes down what it is asked; reads wait until the test lets them."""

    name, torch_device = "cpu", torch.device("cpu")

    def __init__(self) -> None:
        self.updates, self.log, self.gate = Updates("recorder"), list[Any](), threading.Event()

    def find(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: torch.zeros(2)

    def place(self, tensor: torch.Tensor) -> str:
        return tensor.device.type

    def check(self, program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
        self.log.append("check")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def capture(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> Any:
        run(segment.calls, values)
        return Replayed(program.segments.index(segment), self.log)

    def launch(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
        self.log.append(("launch", program.segments.index(segment), [values[number] for number in segment.lists]))
        run(segment.calls, values)

    def fetch(self, number: int, tensor: torch.Tensor) -> Callable[[], list[int]]:
        self.log.append("fetch")

        def read() -> list[int]:
            self.gate.wait(30)
            return [7, 8]

        return read


class Replayed:
    def __init__(self, number: int, log: list[Any]) -> None:
        self.number, self.log = number, log

    def replay(self) -> None:
        self.log.append(("replay", self.number))

    def update(self, lists: Any) -> None:
        self.log.append(("update", self.number, list(lists.values())))


def twice(pool: Any, x: Any, pages: Any, starts: Any) -> tuple[Any, ...]:
    first = ag.attend(x, pool, pages, (starts + 1).long())
    return (ag.attend(first, pool, pages, (starts + (first.sum(-1) > 0).int()).long()),)


def executable(engine: Recorder, *, captured: bool) -> tuple[AclExecutable, list[torch.Tensor]]:
    made, _ = ag.of_body(twice, captured=captured, **ag.ATTENTION)
    return AclExecutable(made, engine), [torch.zeros(shape, dtype=dtype) for shape, dtype in ag.ATTENTION.values()]


def test_a_graph_is_launched_twice_before_it_is_captured_and_one_that_is_not_captured_never() -> None:
    engine = Recorder()
    engine.gate.set()
    opened, operands = executable(engine, captured=True)
    opened.warm_up(operands)
    once = [("launch", 0, []), "fetch", ("launch", 1, [[7, 8]]), "fetch", ("launch", 2, [[7, 8]])]
    assert engine.log == ["check", "enter", *once, *once, "leave"]
    opened.compile(operands)
    assert engine.log[len(once) * 2 + 3 :] == ["check"]
    opened, operands = executable(engine, captured=False)
    del engine.log[:]
    opened.warm_up(operands)
    assert engine.log == []


def test_all_segments_are_queued_before_the_first_length_is_known() -> None:
    engine = Recorder()
    opened, operands = executable(engine, captured=True)
    opened.compile(operands)
    opened(operands)
    assert engine.log == ["check", ("replay", 0), "fetch", ("replay", 1), "fetch", ("replay", 2)]
    engine.gate.set()
    engine.updates.close()
    assert engine.log[6:] == [("update", 1, [[7, 8]]), ("update", 2, [[7, 8]])]


def test_lengths_that_are_there_at_once_wait_for_the_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an idle device, where the thread that launches is slow."""
    engine = Recorder()
    engine.gate.set()
    opened, operands = executable(engine, captured=True)
    opened.compile(operands)
    replay = Replayed.replay

    def slow(segment: Replayed) -> None:
        time.sleep(0.05)
        replay(segment)

    monkeypatch.setattr(Replayed, "replay", slow)
    opened(operands)
    engine.updates.close()
    assert engine.log == [
        "check", ("replay", 0), "fetch", ("replay", 1), "fetch", ("replay", 2), ("update", 1, [[7, 8]]), ("update", 2, [[7, 8]]),
    ]  # fmt: skip


def test_operators_that_are_launched_one_by_one_wait_for_their_lengths() -> None:
    engine = Recorder()
    engine.gate.set()
    opened, operands = executable(engine, captured=False)
    opened.compile(operands)
    opened(operands)
    assert engine.log == ["check", ("launch", 0, []), "fetch", ("launch", 1, [[7, 8]]), "fetch", ("launch", 2, [[7, 8]])]


def test_without_captures_a_graph_that_would_be_captured_is_launched() -> None:
    engine = Recorder()
    engine.gate.set()
    opened, operands = executable(engine, captured=True)
    opened.switch_off({CAPTURE})
    opened.warm_up(operands)
    opened.compile(operands)
    opened(operands)
    assert engine.log == ["check", ("launch", 0, []), "fetch", ("launch", 1, [[7, 8]]), "fetch", ("launch", 2, [[7, 8]])]


def test_without_overlap_operators_run_on_one_stream() -> None:
    made, _ = ag.of_body(lambda x: (x.exp().sin() + x.cos(),), inputs_x=((2,), ag.F32))
    opened = AclExecutable(replace(made, beside=((made.operands + 1, made.operands + 2),)), Recorder())
    assert [segment.streams for segment in opened._program.segments] == [2]
    opened.switch_off({CAPTURE})
    assert opened.file.overlaps
    opened.switch_off({OVERLAP})
    assert not opened.file.overlaps
    assert [segment.streams for segment in opened._program.segments] == [1]


def test_derived_values_come_from_parameters_and_from_constants() -> None:
    made, signature = ag.of_body(
        lambda g, x: (x * (1 + g) + torch.arange(2, dtype=ag.F32, device="meta").exp(),), params_g=((2,), ag.F32), inputs_x=((2,), ag.F32)
    )
    opened = AclExecutable(made, Recorder())
    of_params, constant = opened.derived(signature.params)
    assert (of_params.sources, constant.sources) == ((0,), ())
    assert "params.g" in of_params.expression
    torch.testing.assert_close(opened.derive(0, [torch.tensor([1.0, 2.0])]), torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(opened.derive(1, []), torch.arange(2.0).exp())
    assert opened.reads == {1, 2, 3}
