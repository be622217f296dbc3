"""The connection of a decode server to one prefill server, made anew whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import websockets
from websockets.asyncio.client import ClientConnection, connect

from ...graphs.errors import NpucompileError, ProtocolError, SpecError
from ...runtime.kv_transfer import layout
from ...runtime.kv_transfer.layout import Instance
from ...runtime.kv_transfer.messages import MOST_BYTES, Hello, Message, Refused, decode, encode
from ...runtime.kv_transfer.receiver import Receiver
from .prefill_hub import GREETING_S, PATH, TICK_S

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Between pings; a prefill server that does not answer one within this time is lost."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Before another attempt."""

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

MakeReceiver = Callable[[Callable[[Message], None], Callable[[], int]], Receiver]


def socket_url(url: str) -> str:
    """Where a prefill server takes handovers.

    Raises:
        SpecError: it is no URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query:
        raise SpecError(f"--prefill {url}: legal are URLs like http://HOST:PORT, separated by commas")
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{PATH}"


class PrefillLink:
    """Attributes:
        url: of the prefill server.
        state: what is said of the connection: "connected", or why it is not.
        receiver: of the present connection; None without one.

    Args:
        hello: the greeting of this server, as it is now.
        headers: of the request that opens the connection.
        make: makes a receiver from what sends messages and what draws the numbers of rooms.
        replaced: called when there is another receiver, or none.
    """

    def __init__(
        self, url: str, hello: Callable[[], Hello], headers: Mapping[str, str], make: MakeReceiver, replaced: Callable[[], None]
    ) -> None:
        self.url, self._hello, self._headers, self._make, self._replaced = url, hello, headers, make, replaced
        self._socket = socket_url(url)
        self.state = "was not reached yet"
        self.receiver: Receiver | None = None
        self._engine_id = ""

    @property
    def rooms(self) -> int:
        """Open ones."""
        return self.receiver.rooms if self.receiver else 0

    def is_at(self, place: str) -> bool:
        """Whether this is the prefill server of a router's choice (`routed.Choice`)."""
        parts = urlsplit(self.url)
        return place in (parts.netloc, parts.hostname) or place == self._engine_id != ""

    async def run(self) -> None:
        """Keeps the connection, for ever."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            try:
                async with connect(
                    self._socket,
                    additional_headers=self._headers,
                    ping_interval=HEARTBEAT_S,
                    ping_timeout=HEARTBEAT_S,
                    open_timeout=GREETING_S,
                    compression=None,
                    max_size=MOST_BYTES,
                    proxy=None,
                ) as connection:
                    sessions = await self._greet(connection)
                    pause_s = SHORTEST_PAUSE_S
                    await self._serve(connection, sessions)
            except (OSError, TimeoutError, ValueError, NpucompileError, websockets.WebSocketException) as error:
                self._say(_reason(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _greet(self, connection: ClientConnection) -> list[str]:
        """Returns the sessions that the other server was told."""
        hello = self._hello()
        await connection.send(encode(hello))
        answer = decode(await asyncio.wait_for(connection.recv(), GREETING_S))
        if isinstance(answer, Refused):
            raise layout.LayoutError(f"refuses this server: {answer.reason}")
        if not isinstance(answer, Hello) or answer.version != hello.version:
            raise ProtocolError(f"a greeting of version {hello.version} was expected, not {str(answer)[:80]}")
        self._engine_id = answer.engine_id
        layout.check(Instance.from_json(answer.instance), Instance.from_json(hello.instance))
        return hello.sessions

    async def _serve(self, connection: ClientConnection, sessions: list[str]) -> None:
        """Rooms of one connection, until it ends."""
        outgoing: asyncio.Queue[Message] = asyncio.Queue()
        receiver = self.receiver = self._make(outgoing.put_nowait, lambda: secrets.randbits(62))
        if (present := self._hello().sessions) != sessions:
            receiver.reopened(present)
        self._say("connected")
        self._replaced()

        async def send() -> None:
            while True:
                await connection.send(encode(await outgoing.get()))

        sending, ticking = asyncio.ensure_future(send()), asyncio.ensure_future(_tick(receiver))
        try:
            async for text in connection:
                receiver.received(decode(text))
            raise ProtocolError("the connection was closed")
        finally:
            sending.cancel()
            self.receiver = None
            receiver.disconnected()
            self._replaced()
            if not receiver.rooms:
                ticking.cancel()

    def _say(self, state: str) -> None:
        if state != self.state:
            log.warning("prefill server %s: %s", self.url, state)
        self.state = state


async def _tick(receiver: Receiver) -> None:
    """Ends what waits too long, also of a connection that is gone."""
    while receiver.connected or receiver.rooms:
        await asyncio.sleep(TICK_S)
        receiver.tick()


def _reason(error: Exception) -> str:
    if isinstance(error, websockets.InvalidStatus):
        return f"refuses this server with status {error.response.status_code}: {error.response.body.decode(errors='replace')[:300]}"
    return str(error) or f"did not answer within {GREETING_S:g} s"
