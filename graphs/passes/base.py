"""A graph rewrite and its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule


@dataclass(frozen=True)
class Pass:
    """One rewrite, in place.

    Attributes:
        name: named in the error when the graph is illegal after it.
        run: rewrites the graph; `optimise` recompiles it.
    """

    name: str
    run: Callable[[GraphModule], None]
