"""What pictures take of a model that reads them: memory of its tower, and the time of encode steps, which come before a prompt's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....graphs import tree
from ....models import encode_step
from ....models.quant.recipes import formats_of_scheme
from ....models.registry import find
from ...notation import DEFAULT_ENCODE
from .parameters import PlanParameters
from .products import Speeds, product
from .system import PlannedMachine


@dataclass(frozen=True)
class TowerCost:
    """What every rank of an instance has and does, as each has the whole tower and encodes its group's pictures.

    Attributes:
        weights_bytes: of the tower.
        row_bytes: of a row of the pool, which stands for a token.
        encode_ms: of a step by the patches of its picture; those of several segments take as often as long, or less.
    """

    weights_bytes: float
    row_bytes: float
    encode_ms: Mapping[int, float]

    def lines(self) -> list[str]:
        """As text."""
        times = ", ".join(f"{patches:,} patches {ms:.1f} ms" for patches, ms in self.encode_ms.items())
        memory = f"{self.weights_bytes / 2**30:.2f} GiB of a rank, {self.row_bytes / 2**10:g} KiB a token"
        return [f"pictures   tower {memory}; encode steps, not in what is predicted: {times}"]

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**vars(self), "encode_ms": {str(patches): ms for patches, ms in self.encode_ms.items()}}


def tower_cost(model: str, quantization: str, machine: PlannedMachine, parameters: PlanParameters) -> TowerCost | None:
    """Of a preset; None of one that takes text alone, or whose tower is not published.

    Args:
        quantization: of a row; its recipe says which matrices of the tower are int8.
    """
    source = find(model)
    if source.tower is None or source.model.family.tower is None:
        return None
    formats = formats_of_scheme("none" if quantization == "bf16" else quantization, model)
    tower = source.model.family.tower.in_tiles(replace(source.tower, variant=replace(source.tower.variant, formats=formats)))
    stored = [(path, param.aval) for path, param in tree.flatten(encode_step.params(source.model, tower, torch.bfloat16))]
    matrices = [(path, aval) for path, aval in stored if len(aval.shape) == 2 and not path.endswith(".positions")]
    speeds = Speeds(machine, parameters)

    def encode_ms(patches: int) -> float:
        # Every patch sees all others of its picture: two products of the width for each pair.
        seconds = tower.depth * 4.0 * patches * patches * tower.num_heads * tower.head_width / speeds.attention
        for path, aval in matrices:
            rows = patches / tower.merged if ".merger." in path else patches
            seconds += float(product(speeds, rows, aval.shape[0] * aval.shape[1], aval.dtype.itemsize))
        return float(1e3 * seconds)

    sizes = sorted(size.patches for size in DEFAULT_ENCODE)
    weights = sum(aval.nbytes for _, aval in stored)
    return TowerCost(weights, 2.0 * tower.out_hidden_size, {patches: encode_ms(patches) for patches in sizes})
