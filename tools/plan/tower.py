"""What pictures take of a model that reads them: memory of its tower, and the time of encode steps, which come before a prompt's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...models.registry import find
from ..builder.settings.sizes import DEFAULT_ENCODE
from .parameters import Parameters
from .products import Speeds, product
from .system import Machine

BYTES = 2.0
"""Of a weight: towers are float but where a recipe quantises their blocks."""


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


def tower_cost(model: str, machine: Machine, parameters: Parameters) -> TowerCost | None:
    """Of a preset or checkpoint; None of one that takes text alone, or whose tower is not published."""
    tower = find(model).tower
    if tower is None:
        return None
    h, f, wide, speeds = tower.hidden_size, tower.intermediate_size, tower.merged * tower.hidden_size, Speeds(machine, parameters)
    layer, merger = 4.0 * h * h + 2.0 * h * f, float(wide * (wide + tower.out_hidden_size))

    def encode_ms(patches: int) -> float:
        products = [(patches, tower.patch_dim * h, 1), (patches, layer, tower.depth), (patches / tower.merged, merger, 1)]
        # Every patch sees all others of its picture: two products of the width for each pair.
        seconds = tower.depth * 4.0 * patches * patches * h / speeds.attention
        return 1e3 * float(seconds + sum(times * product(speeds, rows, weights, BYTES) for rows, weights, times in products))

    weights = tower.depth * layer + tower.patch_dim * h + merger + tower.num_position_embeddings * h
    sizes = sorted(size.patches for size in DEFAULT_ENCODE)
    return TowerCost(BYTES * weights, 2.0 * tower.out_hidden_size, {patches: encode_ms(patches) for patches in sizes})
