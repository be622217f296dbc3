"""Manifests of published deployments, with the fields that a model and its layout follow from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from npucompile.graphs.types import Aval, Bucket, Leaf, Limits
from npucompile.lowering.artifact.manifest import GraphEntry, Manifest
from npucompile.models import registry
from npucompile.models.quant.recipes import formats_of_scheme

BF16 = torch.bfloat16
MOE = "qwen3.5-397b"
DISPATCHED, DRAFTED = ["moe_dispatch"] * 7, ["moe_dispatch"] * 3
"""Collectives of a graph that dispatches in four layers and three drafts, or in its drafts alone."""


def physical(experts, ranks):
    """Parameters that tell so many physical experts of each layer."""
    table, weight = Aval((ranks, 512), torch.int32), Aval((experts, 1024, 4096), torch.int32)
    return Leaf("params.layers.0.mlp.physical_ids", table), Leaf("params.layers.0.mlp.down.weight", weight)


def entry(kind, batch, q_len, talks=()):
    bucket = Bucket(kind, batch, q_len)
    return GraphEntry(bucket, (), (), None, "", "", None, {}, {}, tuple((name, "world", "bf16[1]") for name in talks), {})


def manifest(name=MOE, mesh="dp=2,tp=2", graphs=None, **fields):
    """The fields of a manifest that the small model is made from."""
    checkpoint = registry.find(name)
    chosen = {
        "model": {"name": name, "config": checkpoint.text}, "mesh": mesh, "target": "ascend-a3", "quantization": "w4a8", "dtype": "bf16",
        "state": (SimpleNamespace(name="state.layers.0.delta", aval=SimpleNamespace(dtype=BF16)),),
        "limits": Limits(128, 1000, 400, 4096, 4, 3), "params": (),
        "graphs": (entry("prefill", 1, 3584), entry("decode", 4, 4, DISPATCHED), entry("decode", 8, 4, DISPATCHED)),
    }  # fmt: skip
    scheme = fields.get("quantization", chosen["quantization"])
    chosen |= {"formats": formats_of_scheme(scheme, name).as_fields(), "platform": {}, "rules": {"experts": ("dp", "tp")}}
    empty = dict.fromkeys(Manifest.__dataclass_fields__)
    return Manifest(**{**empty, **chosen, **fields, **({"graphs": graphs} if graphs is not None else {})})
