"""A small step of one layer, split over a mesh, for backends to lower."""

from __future__ import annotations

from typing import Any

import torch

from npucompile.graphs import ops
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.layout import constrain
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules

BF16, T, M, F, G, D, P = torch.bfloat16, 4, 32, 64, 2, 16, 128


def forward(params: Any, state: Any, inputs: Any) -> Any:
    """A partitioned layer with pools and one all-reduce."""
    x = inputs["x"]
    key, value = (ops.linear(x, params[name]).view(T, G, D) for name in ("key", "value"))
    k, v = ops.cache_write(state["k"], state["v"], key, value, inputs["slots"])
    y = constrain(ops.linear(torch.nn.functional.silu(ops.linear(x, params["up"])), params["down"]), None, None)
    return {"y": y}, {"k": k, "v": v}


def split(mesh: str, kind: str = "decode") -> PartitionedProgram:
    heads, pool = ("kv_heads", None), Aval((8, P, G, D), BF16, (None, None, "kv_heads", None))
    params = {
        "key": Aval((G * D, M), BF16, heads), "value": Aval((G * D, M), BF16, heads),
        "up": Aval((F, M), BF16, ("ffn", None)), "down": Aval((M, F), BF16, (None, "ffn")),
    }  # fmt: skip
    inputs = {"x": Aval((T, M), BF16), "slots": Aval((T,), torch.int32)}
    program = Program("toy", Bucket(kind, T, 1), forward, params, {"k": pool, "v": pool}, inputs)
    return optimise(partition(program, Mesh.parse(mesh), Rules.of({"kv_heads": "tp", "ffn": "tp"})))
