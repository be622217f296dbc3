"""Whether an engine keeps the prefixes of its requests for later ones, and the order to forget them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixCacheSettings:
    """How prefixes are kept (`scheduler/prefix_index.py`).

    Attributes:
        most_tokens: most tokens of prefixes that no running request uses, per dp group; None for as many as the pages that requests leave.
    """

    most_tokens: int | None = None


class Flush:
    """An order to forget all prefixes."""
