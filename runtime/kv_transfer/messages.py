"""What the two servers of a pair tell each other: JSON objects over one connection, in order, each of a room but the first.

Every field is checked where a message arrives: what is read here goes on to the engine's thread, which nothing may end.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...graphs.errors import ProtocolError

VERSION = 2

MOST_BYTES = 4 << 20
"""Of a message: a prompt of 400,000 tokens, or a greeting of 1,000 ranks with 200 pools each."""

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Any of them; JSON has its kind as `type`."""


class Hello(Message, frozen=True):
    """The first message of either side.

    Attributes:
        instance: `layout.Instance` as JSON, which is read once the version is known.
        sessions: of a decode server, of the transfer engines of its ranks, in the order of the ranks of all dp groups. Whoever knows one
            can read and write the memory behind it, so a prefill server, which answers strangers too, tells none. They are texts, which
            is looked at for each write (`pools.Peer.group`).
        engine_id: of a prefill server, by which vLLM's proxies name it.
    """

    version: int
    instance: msgspec.Raw
    sessions: list[Any] = []
    engine_id: str = ""


class Sessions(Message, frozen=True):
    """The memory of a decode server was opened again.

    Attributes:
        sessions: see `Hello`; for all that it says of `Ready` from now on.
    """

    sessions: list[str]


class Refused(Message, frozen=True):
    """The answer to the greeting of a server that cannot be paired with this one; nothing follows."""

    reason: str


class Ask(Message, frozen=True):
    """A decode server asks for a prompt, whose last token it computes itself.

    Attributes:
        tokens: all known tokens: of a request that lost its pages also those that it has generated.
        routed: the number by which a router told both servers of the request; 0 for none.
    """

    room: Number
    tokens: list[Number]
    cache_salt: str
    tenant: str
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    routed: Number


class Declined(Message, frozen=True):
    """A request that a router sent to both servers is not asked for: its answer was a status and why.

    Attributes:
        routed: see `Ask`.
    """

    routed: Number
    status: Annotated[int, Meta(ge=100, le=599)]
    reason: str


class Computed(Message, frozen=True):
    """Attributes:
    cached_tokens: how many were known before.
    """

    room: Number
    cached_tokens: Number


class Ready(Message, frozen=True):
    """Where the pages and the state go.

    Attributes:
        group: dp group of the decode server.
        pages: in order of position.
        known: how many of them are filled already.
        slot: of the state.
    """

    room: Number
    group: Number
    pages: list[Number]
    known: Number
    slot: Number


class Renew(Message, frozen=True):
    """A prefill server asks to go on writing: its lease is over so long after `at_s` (`lease.LEASE_S`).

    Attributes:
        at_s: of its own clock, when it asked.
    """

    at_s: Seconds


class Renewed(Message, frozen=True):
    """The answer, with the same time; a decode server that has given the other one up does not answer."""

    at_s: Seconds


class Done(Message, frozen=True):
    """All bytes have arrived."""

    room: Number


class Failed(Message, frozen=True):
    """The prefill server has given the room up, and writes nothing more."""

    room: Number
    reason: str


class Abort(Message, frozen=True):
    """The decode server has given the room up.

    Attributes:
        again: whether it asks for the same prompt under another number, so that nobody is told of an end.
    """

    room: Number
    again: bool = False


class Gone(Message, frozen=True):
    """The answer to an abort: nothing is in flight."""

    room: Number


_decoder = msgspec.json.Decoder(
    Hello | Refused | Sessions | Ask | Declined | Computed | Ready | Renew | Renewed | Done | Failed | Abort | Gone
)


class _OfRoom(msgspec.Struct):
    """What a message that is otherwise wrong may have."""

    room: Number


def encode(message: Message) -> str:
    """As it is sent."""
    return msgspec.json.encode(message).decode()


def decode(text: str | bytes) -> Message:
    """As it was sent.

    Raises:
        ProtocolError: it is no message of this version, or longer than `MOST_BYTES`.
    """
    # Characters of a text are a byte or more.
    if len(text) > MOST_BYTES:
        raise ProtocolError(f"a message of {len(text)} bytes; legal are up to {MOST_BYTES}")
    try:
        message: Message = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"a message {text[:80]!r} is none that is legal here: {error}") from None
    return message


def room_of(text: str | bytes) -> int | None:
    """The room of a message that `decode` refuses, which is the only one that has to end for it; None where there is none."""
    try:
        return msgspec.json.decode(text[:MOST_BYTES], type=_OfRoom).room
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
