"""lowering/ascend/emulator/device_state.py: an operator that fails on the stream is named, and says meanwhile how far it is;
graphs share memory as torchair has them share it."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.device_state import DeviceState, FeatureMaps
from npucompile.lowering.ascend.emulator.memory import PinnedMemory
from npucompile.lowering.ascend.emulator.program import EmulatedProgram
from npucompile.lowering.ascend.emulator.stream import Stream


def test_what_runs_is_told_and_what_fails_is_named() -> None:
    state, program, progress = DeviceState("emulated:0", Stream("emulated:0"), PinnedMemory(), "1"), EmulatedProgram(), list[str]()

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


def test_a_graph_takes_the_first_block_that_is_large_enough_and_blocks_are_kept() -> None:
    maps = FeatureMaps()
    for nbytes in (3, 5, 2, 5, 4):
        maps.take(nbytes)
    assert maps.blocks == [3, 5]
    maps.limit_bytes = 13
    with pytest.raises(RuntimeError, match=r"NPU out of memory. Tried to allocate 6 bytes; 8 of 13 are taken"):
        maps.take(6)
    maps.take(5)
    assert maps.blocks == [3, 5]
