"""Pools of numbered pages, state slots and request slots, and who owns which number."""

from __future__ import annotations

import enum

from ...graphs.errors import NpucompileError


class OwnershipError(NpucompileError):
    """Raised when more pages or slots are asked for than are free, or when the ownership record contradicts itself."""


class Keeper(enum.Enum):
    """An owner that is no request."""

    PREFIXES = "the prefix cache"

    def __repr__(self) -> str:
        return self.value


Owner = str | Keeper
"""Id of a request, or who else owns pages and slots."""


class Pool:
    """Numbers 1 to size-1, each free or owned by one owner; number 0 is the null one and is never allocated.

    Args:
        what: what a number stands for, singular, for messages.
        size: count of numbers, including the null one; at least 1.
    """

    def __init__(self, what: str, size: int) -> None:
        if size < 1:
            raise OwnershipError(f"a pool of {size} {what}s: legal is at least 1, the null {what}")
        self._what = what
        self._owner: list[Owner | None] = [None] * size
        self._free: list[int] = list(range(size - 1, 0, -1))
        # The keys of each are its numbers in the order in which they came.
        self._owned: dict[Owner, dict[int, None]] = {}
        # Numbers that were allocated or freed since `take_unused`, and others that may hold something.
        self._recent: set[int] = set()
        self._written: set[int] = set()

    @property
    def size(self) -> int:
        """Count of numbers, including the null one."""
        return len(self._owner)

    @property
    def free_count(self) -> int:
        """Count of numbers that can be allocated."""
        return len(self._free)

    def owners(self) -> frozenset[Owner]:
        """All who own at least one number."""
        return frozenset(self._owned)

    def owned(self, owner: Owner) -> tuple[int, ...]:
        """The numbers of an owner in the order in which they came."""
        return tuple(self._owned.get(owner, ()))

    def allocate(self, count: int, owner: Owner) -> tuple[int, ...]:
        """Allocates `count` more numbers to an owner.

        Raises:
            OwnershipError: when fewer are free, or `count` is negative; nothing is allocated then.
        """
        if not 0 <= count <= len(self._free):
            raise OwnershipError(f"{owner!r} asks for {count} {self._what}s; legal is 0 to the {len(self._free)} that are free")
        if count == 0:
            return ()
        numbers = tuple(self._free.pop() for _ in range(count))
        for number in numbers:
            self._owner[number] = owner
        self._owned.setdefault(owner, {}).update(dict.fromkeys(numbers))
        self._recent.update(numbers)
        return numbers

    def free(self, owner: Owner) -> int:
        """Frees all numbers of an owner; returns how many."""
        numbers = self._owned.pop(owner, {})
        for number in reversed(numbers):
            self._owner[number] = None
            self._free.append(number)
        self._recent.update(numbers)
        return len(numbers)

    def free_number(self, number: int, owner: Owner) -> None:
        """Frees one number of an owner.

        Raises:
            OwnershipError: it is not the owner's.
        """
        self._take(number, owner)
        self._owner[number] = None
        self._free.append(number)
        self._recent.add(number)

    def take_unused(self) -> tuple[int, ...]:
        """Numbers that were free ever since the last call, and owned at some time before; each is told once until it is owned again."""
        unused = tuple(number for number in sorted(self._written - self._recent) if self._owner[number] is None)
        self._written = (self._written | self._recent).difference(unused)
        self._recent.clear()
        return unused

    def transfer(self, number: int, owner: Owner, to: Owner) -> None:
        """Makes a number of one owner another's.

        Raises:
            OwnershipError: it is not the owner's.
        """
        self._take(number, owner)
        self._owner[number] = to
        self._owned.setdefault(to, {})[number] = None

    def check(self) -> None:
        """Checks the whole record.

        Raises:
            OwnershipError: when a number is lost, owned twice, null, or recorded for two different owners.
        """
        holder: dict[int, Owner | None] = {}
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

    def _take(self, number: int, owner: Owner) -> None:
        numbers = self._owned.get(owner, {})
        if number not in numbers:
            raise OwnershipError(f"{self._what} {number} is given up by {owner!r}, which owns {list(numbers)}")
        del numbers[number]
        if not numbers:
            del self._owned[owner]


class PagePool(Pool):
    """Ownership of the KV pages; page 0 is the null page."""

    def __init__(self, num_pages: int) -> None:
        super().__init__("page", num_pages)


class GroupPool(Pool):
    """A pool from which each owner gets one group of `group` numbers."""

    def __init__(self, what: str, size: int, group: int) -> None:
        super().__init__(what, size)
        self.group = group

    def allocate_group(self, owner: Owner) -> tuple[int, ...]:
        """Allocates an owner's group of numbers.

        Raises:
            OwnershipError: when the owner already has one, or too few numbers are free.
        """
        if owner in self._owned:
            raise OwnershipError(f"{owner!r} asks for a group of {self._what}s; it already holds {list(self._owned[owner])}")
        return self.allocate(self.group, owner)


class StateSlotPool(GroupPool):
    """Ownership of the recurrent-state slots; slot 0 is the null slot, a request owns a group of `group` slots."""

    def __init__(self, num_slots: int, group: int = 1) -> None:
        super().__init__("state slot", num_slots, group)


class RequestSlotPool(GroupPool):
    """Ownership of the request slots, in which the device keeps where each request's next decode step starts; slot 0 is the null slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__("request slot", num_slots, 1)
