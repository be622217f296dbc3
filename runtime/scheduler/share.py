"""What a running request has of the pools of its dp group."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .prefix_blocks import Checkpoint
from .request_state import ComputedTokens


@dataclass(slots=True)
class Share:
    """What a running request has of the pools.

    Attributes:
        table: its pages in order of position: those of its path in the prefix index, and then its own.
        slot: its request slot.
        flushes: of the index when it was admitted.
        source: the state that its next chunk starts from, if that is not in its own slot.
        written: states that steps in flight write, by tokens computed.
        num_kept: tokens of its prompt that it was the first to have in the prefix index.
        in_flight: its steps that are launched and whose results are not known.
        last: what its last step computed, as long as no later one is launched, which writes over its states.
    """

    table: array[int] = field(default_factory=lambda: array("i"))
    slot: int = 0
    flushes: int = 0
    source: Checkpoint | None = None
    written: dict[int, Checkpoint] = field(default_factory=dict)
    num_kept: int = 0
    in_flight: int = 0
    last: ComputedTokens | None = None
