"""Plans the experts of each rank from how often each was chosen, by the algorithm of deepseek-ai/EPLB (commit d52c72d).

Experts with the most tokens a copy are copied first; then each, the busiest first, goes to the rank with the least so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

from ...models.expert_placement import Layer, tables

Counts = Sequence[float]
"""How often each logical expert of a layer was chosen."""


def planned(counts: Sequence[Counts], physical: int, ranks: int, *, groups: int = 1, nodes: int = 1) -> tuple[Layer, ...]:
    """A placement of each layer.

    Args:
        physical: experts with their copies; a multiple of `ranks`, at least the logical ones.
        groups: of experts from which a router chooses some first. Where nodes share them evenly, each node has whole groups and their
            copies, so that a token goes to few nodes; elsewhere groups and nodes change nothing.
        nodes: of equally many ranks.
    """
    groups, nodes = (groups, nodes) if groups % nodes == 0 else (1, 1)
    return tuple(_layer(each, physical, ranks, groups, nodes) for each in counts)


def _layer(counts: Counts, physical: int, ranks: int, groups: int, nodes: int) -> Layer:
    size = len(counts) // groups
    layer: list[int] = []
    for members in _packed([sum(counts[group * size : (group + 1) * size]) for group in range(groups)], nodes):
        experts = [group * size + index for group in members for index in range(size)]
        copied = _copied([counts[expert] for expert in experts], physical // nodes)
        shares = [counts[experts[index]] / copied.count(index) for index in range(len(experts))]
        for places in _packed([shares[index] for index in copied], ranks // nodes):
            layer += [experts[copied[place]] for place in places]
    return tuple(layer)


def _copied(counts: Counts, physical: int) -> list[int]:
    """All experts in order, and behind them one copy after the other, of the expert with the most tokens a copy."""
    heap = [(-count, index, 1) for index, count in enumerate(counts)]
    heapq.heapify(heap)
    copied = list(range(len(counts)))
    while len(copied) < physical:
        _, index, copies = heap[0]
        copied.append(index)
        heapq.heapreplace(heap, (-counts[index] / (copies + 1), index, copies + 1))
    return copied


def _packed(weights: Counts, packs: int) -> list[list[int]]:
    """Indices of equally many weights for each pack: the largest first, each into the lightest pack with room."""
    room = len(weights) // packs
    if room == 1:
        return [[index] for index in range(packs)]
    members, sums = [list[int]() for _ in range(packs)], [0.0] * packs
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        pack = min((pack for pack in range(packs) if len(members[pack]) < room), key=sums.__getitem__)
        members[pack].append(index)
        sums[pack] += weights[index]
    return members


def rank_loads(layer: Layer, counts: Counts, ranks: int) -> list[float]:
    """Tokens of each rank's experts, where all ranks send equally many to each logical expert."""
    share, loads = len(layer) // ranks, [0.0] * ranks
    for row in tables(layer, len(counts), ranks):
        for expert, physical in enumerate(row):
            loads[physical // share] += counts[expert] / ranks
    return loads


def imbalance(layers: Sequence[Layer], counts: Sequence[Counts], ranks: int) -> float:
    """Tokens of the busiest rank over the mean, averaged over the layers: a step waits for the busiest of each. 1 without tokens."""
    loads = [rank_loads(layer, each, ranks) for layer, each in zip(layers, counts, strict=True) if any(each)]
    return fmean(max(each) / fmean(each) for each in loads) if loads else 1.0
