"""What a small model computes on emulated ranks, by every runner of its graphs for NPUs, as tensors that are compared bit for bit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from support import emulated, small_images

from npucompile.lowering.ascend.acl_graph.file import decode as acl_decode
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.ge_file import decode
from npucompile.lowering.backend import backend
from npucompile.lowering.platform import CPU
from npucompile.tools.prove.emulated_run import Ranks
from npucompile.tools.prove.npu import BuiltCase, interpreters

MESH, KINDS = "dp=2,tp=2", ("prefill", "decode")


def runs(backend_name: str, quantization: str, home: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Results and pools of all steps and ranks, by name of the runner: the lowered graph, the shipped one, and emulated devices."""
    chosen = backend(backend_name)
    chosen.prepare(home)
    image, built = small_images.image(MESH, KINDS, quantization), {}
    small = image.small
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in small.cases:
            partitioned = small_images.partitioned(small, case, torch.bfloat16, emit_logits=False)
            lowered = chosen.lower(partitioned, CPU)
            data = chosen.compile(lowered, cache_dir=home, threads=0).data
            assert isinstance(data, bytes)
            built[case] = BuiltCase(partitioned, lowered, decode(data) if backend_name == "ge" else acl_decode(data))
        ranks = Ranks.of(small, image.trace, image.checkpoint, torch.bfloat16)
    emulators: dict = {case: (Interpreter(each.lowered.graph, small.mesh), each.signature) for case, each in built.items()}
    yield "lowered", _tensors(ranks, emulators)
    yield "shipped", _tensors(ranks, interpreters(small, built, order="reversed-ready"))
    # Devices want quantised weights in NZ, which only a loader of an artifact lays out.
    machines = {}
    for case, each in built.items() if quantization == "none" else ():
        (directory := home / f"{backend_name} {quantization} {case.bucket.name}").mkdir()
        assert each.shipped is not None
        machines[case] = emulated.Machine(directory, each.shipped, small.mesh), each.signature
    try:
        if machines:
            yield "devices", _tensors(ranks, machines)
    finally:
        for machine, _ in machines.values():
            machine.close()


def _tensors(ranks: Ranks, graphs: Mapping) -> dict[str, torch.Tensor]:
    outputs = ranks.run(graphs)
    steps = {
        f"step {number} rank {rank} {name}": tensor
        for number, of_ranks in outputs.steps.items()
        for rank, results in enumerate(of_ranks)
        for name, tensor in results.items()
    }
    pools = {f"pool {i} rank {rank}": pool for rank, of_rank in enumerate(outputs.state) for i, pool in enumerate(of_rank)}
    return steps | pools


def integers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that are equal on every machine: tokens, counts and drafts, and not what was summed in an order of a CPU's own."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("step") and not tensor.dtype.is_floating_point}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes, dtypes and bits."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:32]
