"""Trees of leaves as flat lists with dotted names, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from .types import Leaf, Tree, leaf_name


def flatten(tree: Tree) -> list[tuple[str, Any]]:
    """(dotted path, leaf) pairs in tree order: `{"a": [x, y]}` gives `a.0`, `a.1`."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return [(".".join(_part(key) for key in path), leaf) for path, leaf in pairs]


def leaves(part: str, avals: Tree) -> tuple[Leaf, ...]:
    """The leaves of a tree of abstract values, named as those of a part: params, state or inputs."""
    return tuple(Leaf(leaf_name(part, path), aval) for path, aval in flatten(avals))


def unflatten(like: Tree, leaves: Iterable[Any]) -> Tree:
    """A tree of the structure of `like` holding `leaves` in tree order.

    Raises:
        ValueError: when the number of leaves differs.
    """
    return pytree.tree_unflatten(list(leaves), pytree.tree_structure(like))


def map_leaves(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`fn` of corresponding leaves, in the structure of `tree`."""
    return pytree.tree_map(fn, tree, *rest)


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
