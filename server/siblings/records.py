"""What doors say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..requests.error_objects import ErrorReply


class Place(NamedTuple):
    """Where a door stands among those of its server.

    Attributes:
        number: of `doors`, from 0.
        name: in those of the sockets on which doors hear each other; no other server has it.
        key: that they show each other, and by which their clients become tenants.
    """

    number: int
    doors: int
    name: str
    key: bytes

    def address(self, door: int) -> str:
        """The socket of a door: in Linux's abstract namespace, where it goes with its process and leaves no file (unix(7))."""
        return f"\0{self.name}/{door}"


class SiblingQuestion(NamedTuple):
    """A question by the name of a method; without a number nobody waits for the answer."""

    number: int | None
    method: str
    arguments: tuple[Any, ...]


class Follow(NamedTuple):
    """Asks for the events of a response, from now until its end or until Leave."""

    number: int
    arguments: tuple[Any, ...]


class Leave(NamedTuple):
    """No more is wanted of what Follow of this number asked for."""

    number: int


class Held(NamedTuple):
    """What a door holds now of what limits are of: by tally and name, those that have changed."""

    door: int
    counts: Mapping[str, Mapping[str, int]]


class Told(NamedTuple):
    """The answer to the question of this number."""

    number: int
    value: Any


class AnswerPart(NamedTuple):
    """The next events of what Follow of this number asked for; `done` with the last of them."""

    number: int
    events: Sequence[dict[str, Any]]
    done: bool


class SiblingRefusal(NamedTuple):
    """Why there is no answer to the question of this number, or no more events."""

    number: int
    reply: ErrorReply
