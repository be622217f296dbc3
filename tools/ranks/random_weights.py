"""Random parameters of the shapes in a manifest, for artifacts that are run without weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator

import torch

from ...graphs.types import Aval, Leaf, Mesh, Rules
from ...lowering.artifact.artifact import Artifact
from ...runtime.device_params import LoadParams


def random_params(artifact: Artifact, rank: int, seed: int = 0) -> LoadParams:
    """Random shards of a rank; ranks that hold the same part of a parameter draw the same values."""
    manifest = artifact.manifest
    mesh, rules = Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
    leaves = {leaf.name: leaf for leaf in manifest.params}

    def load(names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            place = [part.start for part in rules.local_slice(leaves[name].aval, mesh, rank)]
            yield name, random_leaf(leaves[name], rules.local_aval(leaves[name].aval, mesh), zlib.crc32(f"{seed} {name} {place}".encode()))

    return load


def random_leaf(leaf: Leaf, aval: Aval, seed: int) -> torch.Tensor:
    """Random values of a size at which activations neither vanish nor overflow.

    Matrices have the standard deviation of one over the root of their width; vectors are around one, except biases and decay rates,
    which are around zero; scales of quantised matrices make these as large as float ones.
    """
    generator = torch.Generator().manual_seed(seed)
    if aval.dtype == torch.int8:
        return torch.randint(-127, 128, aval.shape, generator=generator, dtype=torch.int8)
    last = leaf.path.rpartition(".")[2].lower()
    if not aval.dtype.is_floating_point:
        if last.endswith("ids"):
            # Rows of tables are looked up by them.
            return torch.arange(math.prod(aval.shape), dtype=aval.dtype).view(aval.shape)
        if aval.dtype == torch.int64:
            # The bits of a float32 in the low half: scales of packed int4 products.
            scale = 0.002 * (1 + torch.rand(aval.shape, generator=generator))
            return scale.view(torch.int32).to(torch.int64)
        return torch.randint(-(2**31), 2**31, aval.shape, generator=generator, dtype=torch.int64).to(aval.dtype)
    if "scale" in last:
        return (0.002 * (1 + torch.rand(aval.shape, generator=generator))).to(aval.dtype)
    noise = torch.randn(aval.shape, generator=generator)
    if len(aval.shape) < 2:
        near_one = "norm" in last or last in ("weight", "gamma")
        return (float(near_one) + 0.2 * noise).to(aval.dtype)
    return (noise / math.sqrt(aval.shape[-1])).to(aval.dtype)
