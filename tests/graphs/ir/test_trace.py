"""graphs/ir/trace.py: a traced program is flat, functional and named; a program whose results contradict its declaration is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.errors import GraphError
from npucompile.graphs.ir.trace import TracedProgram, trace
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Leaf, Program, Tree

F32, I32 = torch.float32, torch.int32
Forward = Callable[[Tree, Tree, Tree], Any]


def program(forward: Forward) -> Program:
    """A program with two parameters, two pools and two inputs."""
    params = {"layers": [{"w": Aval((5, 3), F32, ("ffn", None))}], "norm": Aval((3,), F32)}
    state = {"k": Aval((4, 2, 1, 3), F32), "v": Aval((4, 2, 1, 3), F32)}
    return Program("toy", Bucket("decode", 2, 1), forward, params, state, {"x": Aval((2, 3), F32), "slots": Aval((2,), I32)})


def remember(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
    x = ops.rms_norm(inputs["x"], params["norm"], 1e-6, 1.0)
    rows = x.view(2, 1, 3)
    k, v = ops.cache_write(state["k"], state["v"], rows, 2 * rows, inputs["slots"])
    unread = x + 1
    assert unread.shape == x.shape
    return {"y": torch.relu(ops.linear(x, params["layers"][0]["w"])), "top": x.argmax(-1).to(I32)}, {"k": k, "v": v}


def traced(forward: Forward = remember) -> TracedProgram:
    return trace(program(forward))


def test_text_of_a_small_program(golden: Callable[[str, str], None]) -> None:
    golden("toy_traced", as_text(traced().graph, "toy traced"))


def test_signature_names_leaves_in_tree_order() -> None:
    signature = traced().signature
    assert [leaf.name for leaf in signature.params] == ["params.layers.0.w", "params.norm"]
    assert [leaf.name for leaf in signature.operands][2:] == ["state.k", "state.v", "inputs.x", "inputs.slots"]
    assert signature.outputs == (Leaf("outputs.y", Aval((2, 5), F32)), Leaf("outputs.top", Aval((2,), I32)))
    assert [leaf.name for leaf in signature.results] == ["outputs.y", "outputs.top", "state.k", "state.v"]
    assert signature.params[0].aval.axes == ("ffn", None)


def test_nothing_is_allocated() -> None:
    huge = Aval((1 << 24, 1 << 12), torch.bfloat16)

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": ops.linear(i["x"], p["w"])}, s

    big = Program("big", Bucket("decode", 1, 1), forward, {"w": huge}, {}, {"x": Aval((1, 1 << 12), huge.dtype)})
    assert trace(big).signature.outputs[0].aval.shape == (1, 1 << 24)


def test_a_tree_of_outputs_of_any_shape() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return [i["x"], (i["x"] + 1,)], s

    assert [leaf.name for leaf in traced(forward).signature.outputs] == ["outputs.0", "outputs.1.0"]
    alone = traced(lambda p, s, i: (i["x"] + 1, s))
    assert [leaf.name for leaf in alone.signature.outputs] == ["outputs."]


STATES: list[tuple[str, Forward, str]] = [
    ("shape", lambda p, s, i: ({}, {**s, "k": s["k"][:2]}), "state k is f32[4,2,1,3], the new state returns k as f32[2,2,1,3]"),
    ("dtype", lambda p, s, i: ({}, {**s, "v": s["v"].bfloat16()}), "state v is f32[4,2,1,3], the new state returns v as bf16[4,2,1,3]"),
    ("name", lambda p, s, i: ({}, {"k": s["k"], "w": s["v"]}), "state v is f32[4,2,1,3], the new state returns w as"),
    ("missing", lambda p, s, i: ({}, {"k": s["k"]}), "state has 2 tensors, the new state 1"),
    ("extra", lambda p, s, i: ({}, {**s, "z": s["k"]}), "state has 2 tensors, the new state 3"),
    ("no pair", lambda p, s, i: i["x"], "forward returned Tensor; it returns the pair (outputs, new state)"),
    ("three", lambda p, s, i: ({}, s, s), "forward returned tuple; it returns the pair"),
    ("none", lambda p, s, i: ({"y": None}, s), "output y is None; every leaf is a tensor"),
    ("number", lambda p, s, i: ({"y": {"z": 3}}, s), "output y.z is 3; every leaf is a tensor"),
    ("state none", lambda p, s, i: ({}, {**s, "k": None}), "state k is None; every leaf is a tensor"),
]


@pytest.mark.parametrize(("forward", "message"), [case[1:] for case in STATES], ids=[case[0] for case in STATES])
def test_refuses_what_does_not_return_outputs_and_the_same_state(forward: Forward, message: str) -> None:
    with pytest.raises(GraphError, match="^toy: " + re.escape(message)):
        traced(forward)
