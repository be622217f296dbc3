"""lowering/ascend/emulator/device_state.py: an operator that fails on the stream is named, and says meanwhile how far it is."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.device_state import DeviceState
from npucompile.lowering.ascend.emulator.memory import PinnedMemory
from npucompile.lowering.ascend.emulator.program import Program
from npucompile.lowering.ascend.emulator.stream import Stream


def test_what_runs_is_told_and_what_fails_is_named() -> None:
    state, program, progress = DeviceState("emulated:0", Stream("emulated:0"), PinnedMemory(), "1"), Program(), list[str]()

    def work() -> None:
        with state.running(program):
            program.current = "talk (HcomAllReduce)"
            progress.append(state.stream.doing())
            raise IndexError("out of range")

    with pytest.raises(LoweringError, match=r"a step: operator talk \(HcomAllReduce\): IndexError: out of range"):
        state.stream.run("a step", work)
    assert progress == ["it runs a step, operator talk (HcomAllReduce)"]
    state.stream.close()
    state.updates.close()
