"""What the two servers of a pair tell each other: JSON objects over one connection, in order, each of a room but the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ...graphs.errors import ProtocolError

VERSION = 1


class Hello(NamedTuple):
    """The first message of either side.

    Attributes:
        instance: `layout.Instance` as JSON.
        sessions: of the transfer engines of its ranks, in the order of the ranks of all dp groups.
    """

    version: int
    instance: Mapping[str, Any]
    sessions: list[str]


class Refused(NamedTuple):
    """The answer to the greeting of a server that cannot be paired with this one; nothing follows."""

    reason: str


class Ask(NamedTuple):
    """A decode server asks for a prompt, whose last token it computes itself.

    Attributes:
        tokens: all known tokens: of a request that lost its pages also those that it has generated.
        routed: the number by which a router told both servers of the request; 0 for none.
    """

    room: int
    tokens: list[int]
    cache_salt: str
    tenant: str
    priority: int
    routed: int


class Declined(NamedTuple):
    """A request that a router sent to both servers is not asked for: its answer was a status and why.

    Attributes:
        routed: see `Ask`.
    """

    routed: int
    status: int
    reason: str


class Computed(NamedTuple):
    """Attributes:
    cached_tokens: how many were known before.
    """

    room: int
    cached_tokens: int


class Ready(NamedTuple):
    """Where the pages and the state go.

    Attributes:
        group: dp group of the decode server.
        pages: in order of position.
        known: how many of them are filled already.
        slot: of the state.
    """

    room: int
    group: int
    pages: list[int]
    known: int
    slot: int


class Done(NamedTuple):
    """All bytes have arrived."""

    room: int


class Failed(NamedTuple):
    """The prefill server has given the room up, and writes nothing more."""

    room: int
    reason: str


class Abort(NamedTuple):
    """The decode server has given the room up."""

    room: int


class Gone(NamedTuple):
    """The answer to an abort: nothing is in flight."""

    room: int


Message = Hello | Refused | Ask | Declined | Computed | Ready | Done | Failed | Abort | Gone

_ALL = (Hello, Refused, Ask, Declined, Computed, Ready, Done, Failed, Abort, Gone)
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in _ALL}
M = TypeVar("M", bound=Message)


def to_json(message: Message) -> dict[str, Any]:
    """As it is sent."""
    return {"type": type(message).__name__.lower(), **message._asdict()}


def from_json(data: Any) -> Message:
    """As it was sent.

    Raises:
        ProtocolError: it is no message of this version.
    """
    if not isinstance(data, dict) or data.get("type") not in _KINDS:
        raise ProtocolError(f"a message {str(data)[:80]!r}; legal are objects with a type of {', '.join(_KINDS)}")
    kind = _KINDS[data["type"]]
    wanted, got = set(kind._fields), data.keys() - {"type"}
    if wanted != got:
        raise ProtocolError(f"a message {data['type']} with {', '.join(sorted(got))}; legal is {', '.join(sorted(wanted))}")
    if "room" in wanted and type(data["room"]) is not int:
        raise ProtocolError(f"a message {data['type']} of room {data['room']!r}; legal is a number")
    message: Message = kind(**{name: data[name] for name in kind._fields})
    return message
