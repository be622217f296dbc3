"""Counts by name that limits are of: what this process holds, and what the other doors of its server said that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping


class Tally:
    """Used on the event loop alone. `[name]`, `total` and `names` are over all doors, `own` of this process.

    What others hold is some ms old, so that doors that admit at the same moment may together exceed a limit by what they admit then.

    Attributes:
        on_change: called when what this process holds has changed; None where there are no others.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] | None = None
        self._own: Counter[str] = Counter()
        self._others: dict[int, dict[str, int]] = {}
        self._changed: set[str] = set()

    def __getitem__(self, name: str) -> int:
        return self._own[name] + sum(held.get(name, 0) for held in self._others.values())

    def __bool__(self) -> bool:
        return bool(self._own)

    @property
    def own(self) -> int:
        """All that this process holds."""
        return self._own.total()

    @property
    def total(self) -> int:
        """All that is held."""
        return self.own + sum(sum(held.values()) for held in self._others.values())

    def names(self) -> set[str]:
        """Those with something."""
        return set(self._own).union(*self._others.values())

    def add(self, name: str, count: int) -> None:
        """This process holds so many more."""
        if not count:
            return
        self._own[name] += count
        if not self._own[name]:
            del self._own[name]
        if self.on_change:
            self._changed.add(name)
            self.on_change()

    def changes(self) -> dict[str, int]:
        """What this process holds now of what has changed since the last call."""
        changed, self._changed = self._changed, set()
        return {name: self._own.get(name, 0) for name in changed}

    def held(self) -> dict[str, int]:
        """What this process holds."""
        return dict(self._own)

    def hear(self, door: int, counts: Mapping[str, int]) -> None:
        """What another door holds of these names now."""
        held = self._others.setdefault(door, {})
        held.update(counts)
        for name in [name for name in counts if not held[name]]:
            del held[name]

    def forget(self, door: int) -> None:
        """A door has ended."""
        self._others.pop(door, None)
