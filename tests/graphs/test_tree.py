"""graphs/tree.py: trees flatten to dotted names in a fixed order, and unflatten to equal trees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs import tree

LEAVES = st.integers()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    ),
    max_leaves=12,
)


def test_names_are_dotted_paths_in_tree_order() -> None:
    assert tree.flatten({"b": [1, (2,)], "a": {"x": 3}}) == [("b.0", 1), ("b.1.0", 2), ("a.x", 3)]
    assert tree.flatten(5) == [("", 5)]


@given(TREES)
def test_unflatten_undoes_flatten(value: Any) -> None:
    pairs = tree.flatten(value)
    assert tree.unflatten(value, [leaf for _, leaf in pairs]) == value
    assert len({name for name, _ in pairs}) == len(pairs)


@given(TREES)
def test_map_leaves_keeps_names(value: Any) -> None:
    doubled = tree.map_leaves(lambda x, y: x + y, value, value)
    assert tree.flatten(doubled) == [(name, 2 * leaf) for name, leaf in tree.flatten(value)]


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3], []])
def test_unflatten_counts(leaves: list[int]) -> None:
    with pytest.raises(ValueError, match=str(len(leaves))):
        tree.unflatten({"a": 0, "b": 0}, leaves)
