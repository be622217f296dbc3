"""Runs steps on all ranks of a mesh in this process: verify, bring-up and the emulated run drive their ranks by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...graphs.types import COORDS, Mesh, Signature
from ...runtime.device_params import LoadParams

Run = Callable[[Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]]
"""One step of all ranks: operands of each, results of each; state operands are updated in place."""
Outputs = dict[str, torch.Tensor]


def load_ranks(mesh: Mesh, signature: Signature, load_params: Callable[[int], LoadParams]) -> list[list[torch.Tensor]]:
    """Parameters of every rank, in the order of a signature."""
    names = [leaf.name for leaf in signature.params]
    loaded = [dict(load_params(rank)(names)) for rank in range(mesh.size)]
    return [[params[name] for name in names] for params in loaded]


def run_step(
    run: Run,
    mesh: Mesh,
    signature: Signature,
    params: Sequence[Sequence[torch.Tensor]],
    state: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[Mapping[str, torch.Tensor]],
) -> list[Outputs]:
    """Runs one step on all ranks; returns the outputs of each rank by name.

    Args:
        params: of each rank, in the order of the signature.
        state: pools of each rank, which the step updates.
        inputs: of each dp group by name, without the coordinates of its ranks.
    """
    operands = []
    for rank in range(mesh.size):
        own = {**inputs[mesh.coordinates(rank)["dp"]], COORDS: mesh.coords(rank)}
        operands.append([*params[rank], *state[rank], *(own[leaf.path] for leaf in signature.inputs)])
    names = [leaf.path for leaf in signature.outputs]
    return [dict(zip(names, results, strict=True)) for results in run(operands)]
