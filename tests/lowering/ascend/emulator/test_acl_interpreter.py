"""lowering/ascend/emulator/acl_interpreter.py: all ranks of a mesh in one process, each with its operands and derived values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.acl_interpreter import AclInterpreter


def test_ranks_exchange_and_derive_values_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))

    def body(gamma: Any, pool: Any, x: Any) -> tuple[Any, ...]:
        pool.add_(1)
        return (torch.ops._c10d_functional.all_reduce(x * (1 + gamma), "sum", "tp"),)

    made, _ = ag.of_body(body, params_g=((2,), ag.F32), state_pool=((2,), ag.F32), inputs_x=((2,), ag.F32))
    assert made.folded is not None
    operands = [[torch.full((2,), float(rank)), torch.zeros(2), torch.ones(2)] for rank in range(2)]
    assert [results[0].tolist() for results in AclInterpreter(made, Mesh.parse("tp=2"))(operands)] == [[3.0, 3.0]] * 2
    assert all(own[1].tolist() == [1.0, 1.0] for own in operands)
