"""lowering/ascend/emulator/program.py: operators run in turn on all ranks, values end with their last reader, groups must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.ge_program import GeProgram
from npucompile.lowering.ascend.emulator.program import MeshExchange


def gathering(group: str) -> GeProgram:
    hand = gc.Hand()
    return GeProgram(hand.model_with(hand.op("HcomAllGather", {"x": hand.data(0)}, "op", rank_size=2, group=group)))


def test_values_are_gone_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, num_alive = gc.Hand(), []
    last = hand.data(0)
    for i in range(4):
        last = hand.op("Neg", {"x": last}, f"neg{i}")
    program = GeProgram(hand.model_with(last))
    plain = program.run_step

    def counted(step: Any, ranks: Any, exchange: Any) -> None:
        num_alive.append(sum(value is not None for value in ranks[0]))
        plain(step, ranks, exchange)

    monkeypatch.setattr(program, "run_step", counted)
    program.run([[torch.ones(1)]], MeshExchange(Mesh()))
    assert num_alive == [1] * 4


def test_a_program_that_does_not_end_says_where_it_is() -> None:
    program = gathering("tp")
    running = []

    def exchange(step: Any, calls: Any) -> Any:
        running.append(str(program.current))
        return step.run_group([calls[0], step.of_member(calls[0], step.tensors(calls[0]))])[:1]

    program.run([[torch.zeros(2)]], exchange)
    assert running == ["op (HcomAllGather)"]
    assert program.current is None


def test_members_that_disagree_are_refused() -> None:
    exchange = MeshExchange(Mesh.parse("dp=2,tp=2"))
    with pytest.raises(LoweringError, match=r"op .*: rank 2 brings \['f32\[2\]'\], rank 3 \['f32\[3\]'\]; legal is the same"):
        gathering("tp").run([[torch.zeros(2 + (rank == 3))] for rank in range(4)], exchange)
    with pytest.raises(LoweringError, match=r"rank 0 brings \['f32\[2\]'\], rank 1 \['f16\[2\]'\]"):
        gathering("tp").run([[torch.zeros(2, dtype=torch.float16 if rank == 1 else None)] for rank in range(4)], exchange)
    with pytest.raises(LoweringError, match=r"over group 'hccl_0'; this mesh has \['dispatch', 'dp', 'fused_experts', 'tp', 'world'\]"):
        gathering("hccl_0").run([[torch.zeros(2)]] * 4, exchange)
