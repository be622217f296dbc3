"""Manifests of artifacts for NPUs that are not built, the small models shrunk from them, and their step traces."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny
from support.once import made_once

from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.manifest import GraphEntry, Manifest
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.lower import lower_eager
from npucompile.models import registry, step
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.tools.builder import driver
from npucompile.tools.prove.emulated_run import Graphs, Ranks
from npucompile.tools.prove.small_model import BucketCase, SmallModel, random_checkpoint, shrink
from npucompile.tools.prove.step_trace import StepTrace, record_trace

F32, BF16 = torch.float32, torch.bfloat16
MOE = "qwen3.5-397b"
DISPATCHED, IN_PARTS = ("moe_dispatch",) * 63, ("moe_dispatch",) * 243


def entry(kind: str, batch: int, q_len: int, talks: tuple[str, ...] = ()) -> GraphEntry:
    """A bucket's entry with nothing but its collectives."""
    return GraphEntry(
        Bucket(kind, batch, q_len), (), (), None, "", "", None, {}, {}, tuple((name, "world", "bf16[1]") for name in talks), {}
    )


def manifest(name: str = MOE, mesh: str = "dp=2,tp=2", **fields: Any) -> Manifest:
    """The parts of a manifest that `shrink` reads."""
    chosen = {
        "model": {"name": name, "config": registry.find(name).text}, "mesh": mesh, "target": "ascend-a3", "quantization": "w4a8",
        "state": (SimpleNamespace(name="state.layers.0.delta", aval=SimpleNamespace(dtype=BF16)),), "dtype": "bf16",
        "limits": Limits(128, 1000, 400, 4096, 4, 3), "params": (),
        "graphs": (entry("prefill", 1, 3584, IN_PARTS), entry("decode", 4, 4, DISPATCHED), entry("decode", 8, 4, DISPATCHED)),
    }  # fmt: skip
    scheme = fields.get("quantization", chosen["quantization"])
    # Not every mesh of a trace divides the experts.
    spread = {} if registry.find(name).model.config.num_experts % Mesh.parse(mesh).size else {"experts": ("dp", "tp")}
    chosen |= {"formats": formats_of_scheme(scheme, name).as_fields(), "platform": {}, "rules": spread}
    return Manifest(**{**dict.fromkeys(Manifest.__dataclass_fields__), **chosen, **fields})


@dataclass(frozen=True)
class Image:
    """A small model, its checkpoint, its step trace and its ranks."""

    small: SmallModel
    checkpoint: dict[str, torch.Tensor]
    trace: StepTrace
    ranks: Ranks


@functools.cache
def image(mesh: str, kinds: tuple[str, ...], quantization: str = "none", steps: int = 2, seed: int = 0, drafts: int = 2) -> Image:
    """The small image with one bucket of each kind."""
    buckets = {"prefill": Bucket("prefill", 1, 40), "decode": Bucket("decode", 4, drafts + 1)}
    graphs = tuple(entry(kind, buckets[kind].batch, buckets[kind].q_len, DISPATCHED) for kind in kinds)
    limits = Limits(128, 99, 99, 1024, drafts + 1 if "decode" in kinds else 1, drafts)
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = shrink(manifest(mesh=mesh, quantization=quantization, graphs=graphs, limits=limits), steps)
        checkpoint = random_checkpoint(small.model, generator)
        trace = record_trace(small, checkpoint, generator)
    return Image(small, checkpoint, trace, Ranks.of(small, trace, checkpoint, F32))


def partitioned(small: SmallModel, case: BucketCase, dtype: torch.dtype = F32, *, emit_logits: bool = True) -> PartitionedProgram:
    """A case's graph of one device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"emit_logits": emit_logits, "max_logprobs": small.max_logprobs}
        program = step.program(small.model_for(case, dtype), case.bucket, small.limits, dtype, **how)
        return optimise(partition(program, small.mesh, small.rules(case)))


@functools.cache
def eager(mesh: str, kinds: tuple[str, ...], emit_logits: bool = True, drafts: int = 2) -> Graphs:
    """The graphs of the image's cases, run on all ranks with the references of primitives."""
    graphs, small = {}, image(mesh, kinds, drafts=drafts).small
    for case in small.cases:
        lowered = lower_eager(partitioned(small, case, emit_logits=emit_logits))
        graphs[case] = Interpreter(lowered.graph, small.mesh), lowered.signature
    return graphs


def shipped(
    sizes: Mapping[str, int],
    factory: pytest.TempPathFactory,
    quantization: str = "none",
    mesh: str = "dp=2,tp=2",
    backend: str = "ge",
    packages: tuple[str, ...] = (),
) -> Artifact:
    """An artifact for NPUs of six random layers, one prefill and one decode bucket; not to be changed."""

    def make(home: Path) -> None:
        layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3, "num_experts": 8}
        model = tiny.write_checkpoint(home / "small", **sizes, **layers)
        options = {"quantization": quantization, "mesh": mesh, "backend": backend, "operator_packages": packages}
        plan = tiny.planned_device(model, buckets=(4,), prefill=(16,), **options)
        # CANN's kernel of the delta rule takes states in the dtype of the activations.
        variant = plan.model.config.variant if packages else replace(plan.model.config.variant, recurrent=BF16)
        plan = replace(plan, model=replace(plan.model, config=replace(plan.model.config, variant=variant)))
        threads = torch.get_num_threads()
        driver.build(plan, home / "artifact", home / "cache", tiny.QUIET, jobs=1)
        torch.set_num_threads(threads)
        logging.getLogger("torch").setLevel(logging.WARNING)

    return Artifact.open(made_once(factory, "-".join(("shipped", quantization, mesh, backend, *packages)), make) / "artifact")
