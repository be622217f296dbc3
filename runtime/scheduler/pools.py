"""Turns a pool of numbered pages, state slots or seats into a record of who owns which."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...graphs.errors import NpucompileError


class OwnershipError(NpucompileError):
    """Raised when pages, slots or seats are asked for that are not there, or when the ownership record contradicts itself."""


class Pool:
    """Numbers 1 to size-1, each free or owned by one owner; number 0 is null and never given.

    Args:
        what: singular name of one number, for messages.
        size: count of numbers, the null one included; at least 1.
    """

    def __init__(self, what: str, size: int) -> None:
        if size < 1:
            raise OwnershipError(f"a pool of {size} {what}s: legal is at least 1, the null {what}")
        self._what = what
        self._owner: list[str | None] = [None] * size
        self._free: list[int] = list(range(size - 1, 0, -1))
        self._owned: dict[str, array[int]] = {}

    @property
    def size(self) -> int:
        """Count of numbers, the null one included."""
        return len(self._owner)

    @property
    def free_count(self) -> int:
        """How many numbers can be allocated."""
        return len(self._free)

    def owners(self) -> frozenset[str]:
        """Everyone who holds at least one number."""
        return frozenset(self._owned)

    def owned(self, owner: str) -> Sequence[int]:
        """What an owner holds, in the order it was allocated: a read-only int32 snapshot that later calls leave alone."""
        return memoryview(self._owned.get(owner) or array("i")).toreadonly()

    def allocate(self, count: int, owner: str) -> tuple[int, ...]:
        """Gives `count` more numbers to an owner.

        Raises:
            OwnershipError: when fewer are free, or `count` is negative; nothing is allocated then.
        """
        if not 0 <= count <= len(self._free):
            raise OwnershipError(f"{owner!r} asks for {count} {self._what}s; legal is 0 to the {len(self._free)} that are free")
        if count == 0:
            return ()
        given = tuple(self._free.pop() for _ in range(count))
        for number in given:
            self._owner[number] = owner
        # A new array, so that snapshots handed out before stay what they were.
        self._owned[owner] = self._owned.get(owner, array("i")) + array("i", given)
        return given

    def free(self, owner: str) -> int:
        """Takes back all that an owner holds; returns how many that were."""
        numbers = self._owned.pop(owner, array("i"))
        for number in reversed(numbers):
            self._owner[number] = None
            self._free.append(number)
        return len(numbers)

    def check(self) -> None:
        """Walks the whole record once.

        Raises:
            OwnershipError: when a number is lost, held twice, null, or the record disagrees with itself about its owner.
        """
        holder: dict[int, str | None] = {}
        for owner, numbers in [(None, self._free), *self._owned.items()]:
            for number in numbers:
                if not 0 < number < self.size:
                    raise OwnershipError(f"{self._what} {number} is held by {owner!r}; legal is 1 to {self.size - 1}")
                if number in holder:
                    raise OwnershipError(f"{self._what} {number} is held twice, by {holder[number]!r} and by {owner!r}")
                if self._owner[number] != owner:
                    raise OwnershipError(f"{self._what} {number} is held by {owner!r} but recorded for {self._owner[number]!r}")
                holder[number] = owner
        if len(holder) != self.size - 1:
            lost = sorted(set(range(1, self.size)) - set(holder))
            raise OwnershipError(f"{self._what}s {lost} are neither free nor owned")


class PagePool(Pool):
    """Ownership of the KV pages; page 0 is the null page."""

    def __init__(self, num_pages: int) -> None:
        super().__init__("page", num_pages)


class GroupPool(Pool):
    """Numbers that an owner gets once, so many at a time."""

    def __init__(self, what: str, size: int, group: int) -> None:
        super().__init__(what, size)
        self.group = group

    def allocate_group(self, owner: str) -> tuple[int, ...]:
        """Gives an owner its group of numbers.

        Raises:
            OwnershipError: when the owner has one already, or too few numbers are free.
        """
        if owner in self._owned:
            raise OwnershipError(f"{owner!r} asks for a group of {self._what}s; it already holds {list(self._owned[owner])}")
        return self.allocate(self.group, owner)


class SlotPool(GroupPool):
    """Ownership of the recurrent-state slots; slot 0 is the null slot, a request owns a group of `group` slots."""

    def __init__(self, num_slots: int, group: int = 1) -> None:
        super().__init__("slot", num_slots, group)


class SeatPool(GroupPool):
    """Ownership of the seats, from which the decode steps of requests start; seat 0 is the null seat, a request owns one."""

    def __init__(self, num_seats: int) -> None:
        super().__init__("seat", num_seats, 1)
