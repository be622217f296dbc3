"""tools/builder/expert_planner.py: the published example, properties of any plan, and the best plans of small layers."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.models.expert_placement import by_default
from npucompile.tools.builder.expert_planner import imbalance, planned, rank_loads

PUBLISHED = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
"""Two layers of twelve experts in four groups, on two nodes of four devices: the example of deepseek-ai/EPLB's README."""


def test_the_published_example() -> None:
    assert planned(PUBLISHED, 16, 8, groups=4, nodes=2) == (
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    )


def test_the_imbalance_that_another_planner_publishes_of_this_one() -> None:
    """vllm-project/vllm-ascend#3042 says 1.28 of eight experts in sixteen places of eight ranks, where copies share tokens evenly.

    Five copies cannot serve eight ranks evenly, by a table on each.
    """
    counts = [600, 560, 120, 120, 20, 10, 10, 10]
    (layer,) = planned([counts], 16, 8)
    loads = [sum(counts[expert] / layer.count(expert) for expert in layer[place : place + 2]) for place in range(0, 16, 2)]
    assert max(loads) / (sum(counts) / 8) == pytest.approx(1.28)
    assert imbalance([layer], [counts], 8) == pytest.approx(1.434, abs=0.001)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    nodes, per_node, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups, ranks = nodes * draw(st.integers(1, 3)), nodes * per_node
    logical = groups * per_group
    physical = -(-(logical + draw(st.integers(0, 12))) // ranks) * ranks
    return draw(st.lists(st.integers(0, 1000), min_size=logical, max_size=logical)), physical, ranks, groups, nodes


@given(cases())
def test_any_plan(case: tuple[list[int], int, int, int, int]) -> None:
    counts, physical, ranks, groups, nodes = case
    (layer,) = planned([counts], physical, ranks, groups=groups, nodes=nodes)
    copies = Counter(layer)
    assert len(layer) == physical
    assert set(copies) == set(range(len(counts)))
    for node in range(nodes):
        own = set(layer[node * physical // nodes : (node + 1) * physical // nodes])
        size = len(counts) // groups
        assert len({expert // size for expert in own}) == groups // nodes, "whole groups"
        # An expert has a copy more than another one only if that pays for the busiest copy.
        for busy, idle in itertools.permutations(own, 2):
            assert copies[idle] == 1 or counts[idle] / (copies[idle] - 1) >= counts[busy] / copies[busy]
    assert sum(rank_loads(layer, counts, ranks)) == pytest.approx(sum(counts))


def test_groups_that_nodes_cannot_share_change_nothing() -> None:
    assert planned(PUBLISHED, 16, 8, groups=3, nodes=2) == planned(PUBLISHED, 16, 8)


@given(st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_experts_without_copies_are_nearly_as_even_as_can_be(counts: list[int]) -> None:
    """Against all placements: the longest-first rule is within 4/3 of the best (Graham, 1969)."""
    (layer,) = planned([counts], 6, 3)
    busiest = max(rank_loads(layer, counts, 3))
    best = min(max(sum(counts[e] for e in order[i : i + 2]) for i in (0, 2, 4)) for order in itertools.permutations(range(6)))
    assert best - 1e-9 <= busiest <= 4 / 3 * best


def skewed(sigma: float) -> list[list[float]]:
    draw = random.Random(0)
    return [[draw.lognormvariate(0, sigma) for _ in range(512)] for _ in range(8)]


@pytest.mark.parametrize(("sigma", "skew"), [(0.58, 1.2), (1.33, 1.6), (1.86, 2.1)])
def test_what_a_plan_gains_of_a_simulated_skew(sigma: float, skew: float) -> None:
    """Log-normal loads, as they are measured, of 512 experts on 16 ranks: in order, planned, and with a copy more on each rank."""
    counts = skewed(sigma)
    before = imbalance([by_default(512, 512)] * 8, counts, 16)
    moved, copied = (imbalance(planned(counts, physical, 16), counts, 16) for physical in (512, 528))
    assert before == pytest.approx(skew, rel=0.03)
    assert moved < 1.4
    assert copied < 1.04


def test_layers_without_tokens_do_not_count() -> None:
    assert imbalance([(0, 1)], [[0, 0]], 2) == 1
    assert imbalance([(0, 1), (0, 1)], [[0, 0], [3, 1]], 2) == 1.5
