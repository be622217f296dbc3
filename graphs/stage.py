"""What every stage of a program says of itself: its text, its cost, its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.fx import GraphModule

from . import cost, text
from .cost import Memory
from .primitive import Cost
from .types import Signature


class Stage(ABC):
    """Base of the records that hold a program's graph: traced, partitioned, lowered."""

    graph: GraphModule
    signature: Signature

    @property
    @abstractmethod
    def title(self) -> str:
        """First line of the text: the bucket and the stage."""

    def as_text(self) -> str:
        """Stable text: the same program gives the same lines."""
        return text.as_text(self.graph, self.title)

    def cost(self) -> Cost:
        """Operations and bytes moved by one run of the graph, as `graphs.cost.cost` counts them."""
        return cost.cost(self.graph)

    def memory(self) -> Memory:
        """Bytes one device needs to run the graph, as `graphs.cost.memory` counts them."""
        return cost.memory(self.graph, self.signature)
