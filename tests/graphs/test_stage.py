"""graphs/stage.py: every stage has a text and a cost, and stages of one graph agree on them."""

from __future__ import annotations

import torch

from npucompile.graphs import cost, ops
from npucompile.graphs.spmd.layout import constrain
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.lower import lower_eager

F32 = torch.float32
POOL = Aval((4, 2, 3, 8), F32)


def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
    hidden = constrain(ops.linear(inputs["x"], params["w"]), None, None)
    rows = hidden.view(2, 3, 8)
    k, v = ops.cache_write(state["k"], state["v"], rows, rows, inputs["slots"])
    return {"hidden": hidden}, {"k": k, "v": v}


PROGRAM = Program(
    "toy",
    Bucket("decode", 2, 1),
    forward,
    {"w": Aval((24, 16), F32, (None, "ffn"))},
    {"k": POOL, "v": POOL},
    {"x": Aval((2, 16), F32), "slots": Aval((2,), torch.int32)},
)


def test_lowering_in_place_changes_neither_cost_nor_what_is_held() -> None:
    partitioned = partition(PROGRAM, Mesh(), Rules())
    lowered = lower_eager(partitioned)
    assert partitioned.cost() == lowered.cost() == cost.cost(partitioned.graph)
    assert partitioned.memory().as_dict() == lowered.memory().as_dict()
    assert partitioned.memory().state_bytes == 2 * POOL.nbytes


def test_a_device_of_two_holds_and_multiplies_half_a_split_weight() -> None:
    whole = partition(PROGRAM, Mesh(), Rules())
    half = partition(PROGRAM, Mesh.parse("tp=2"), Rules.of({"ffn": "tp"}))
    assert half.as_text().startswith("decode-b2-q1 partitioned over mesh tp=2\n")
    assert 2 * half.memory().params_bytes == whole.memory().params_bytes
    assert half.cost().flops < whole.cost().flops
