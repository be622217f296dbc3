"""tools/prove/all_ranks.py: each rank gets its own parameters, pools and coordinates, and the inputs of its dp group."""

from __future__ import annotations

import torch

from npucompile.graphs.types import COORDS, Aval, Leaf, Mesh, Signature
from npucompile.tools.prove.all_ranks import run_step

MESH = Mesh.parse("dp=2,tp=2")
I32 = torch.int32
SIGNATURE = Signature(
    (Leaf("params.b", Aval((1,), I32)), Leaf("params.a", Aval((1,), I32))),
    (Leaf("state.pool", Aval((1,), I32)),),
    (Leaf(f"inputs.{COORDS}", Aval((2,), I32)), Leaf("inputs.tokens", Aval((1,), I32))),
    (Leaf("outputs.sum", Aval((1,), I32)),),
)


def test_a_step_has_the_operands_of_every_rank_and_updates_its_pools():
    operands_of_ranks = []

    def run(operands):
        for b, a, pool, coords, tokens in operands:
            operands_of_ranks.append((int(b), int(a), coords.tolist(), int(tokens)))
            pool += 10
        return [[operand[4] + operand[2]] for operand in operands]

    params = [[torch.tensor([rank]), torch.tensor([-rank])] for rank in range(4)]
    state = [[torch.tensor([rank])] for rank in range(4)]
    inputs = [{"tokens": torch.tensor([100])}, {"tokens": torch.tensor([200])}]
    outputs = run_step(run, MESH, SIGNATURE, params, state, inputs)
    assert operands_of_ranks == [(rank, -rank, MESH.coords(rank).tolist(), 100 if rank < 2 else 200) for rank in range(4)]
    assert [int(own["sum"]) for own in outputs] == [110, 111, 212, 213]
    assert [int(own[0]) for own in state] == [10, 11, 12, 13]
