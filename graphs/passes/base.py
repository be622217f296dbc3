"""Turns a graph rewrite into a named record that says whether it may change numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule


@dataclass(frozen=True)
class Pass:
    """One rewrite, in place.

    Attributes:
        name: said when the graph is illegal after it.
        run: rewrites the graph; recompiling is the driver's.
        changes_numerics: whether results may differ in the last bits.
    """

    name: str
    run: Callable[[GraphModule], None]
    changes_numerics: bool
