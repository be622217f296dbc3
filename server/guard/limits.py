"""Limits on clients, each of them and all together."""

from __future__ import annotations

from dataclasses import dataclass

from ...graphs.errors import RequestError, SpecError
from ..requests.bounds import MAX_PRIORITY

MAX_FRAME_BYTES = 4 * 2**20
LEAST_FRAME_BYTES = 2**18
LEAST_CONNECTIONS = 256
"""Of an address by default, however few requests can run."""

BYTES_PER_TOKEN = 32
"""Of a prompt in a frame: text of one token, escaped as JSON, and what stands around it."""


@dataclass(frozen=True)
class SocketLimits:
    """Limits on clients. A client is a key where keys are asked for, else an address.

    Attributes:
        max_frame_bytes: larger frames are refused with an error event; None derives it from the longest context.
        max_streams: responses open at once on a socket, of up to protocol.MAX_COMPLETIONS requests each.
        max_connections: connections open at once, HTTP and websocket together; None derives it from the requests that can run at once.
        max_connections_per_client: of one address; None derives it likewise.
        max_queue: requests that may wait beside those that run.
        max_requests_per_client: requests of one client that may wait or run; None is as many as of all.
        max_queued_tokens: tokens of the prompts of requests that wait or run, all together.
        max_tokens_per_client: those of one client; None is as many.
        min_priority: most urgent priority that requests may have.
        request_timeout_s: how long a request may wait and run; its own timeout may be shorter. None is no limit.
        first_token_timeout_s: how long it may wait for its first token.
        max_queue_bytes: bytes that may wait to be sent on a socket.
        slow_reader_s: how old what waits to be sent may get before the client is too slow.
        handshake_s: how long a connection may take to send a whole request.
        refusals_per_s: refusals of one client a second, above which they wait for their turns; None lets none wait.
        max_stored_bytes: responses that later requests may name take at most this together; 0 keeps none.
        stored_s: how long they are kept after they were last named.
        max_replay_bytes: of the events of one response that can be resumed.
        resume_grace_s: how long a response that can be resumed goes on without a reader.
        close_timeout_s: how long sending the close frame may take.
        strict_fields: whether requests are refused for what no prompt can have, such as tools of a provider.
    """

    max_frame_bytes: int | None = None
    max_streams: int = 256
    max_connections: int | None = None
    max_connections_per_client: int | None = None
    max_queue: int = 2048
    max_requests_per_client: int | None = None
    max_queued_tokens: int = 2**24
    max_tokens_per_client: int | None = None
    min_priority: int = 0
    request_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    max_queue_bytes: int = 64 * 2**20
    slow_reader_s: float = 10.0
    handshake_s: float = 10.0
    refusals_per_s: float | None = 200.0
    max_stored_bytes: int = 256 * 2**20
    stored_s: float = 3600.0
    max_replay_bytes: int = 8 * 2**20
    resume_grace_s: float = 30.0
    close_timeout_s: float = 5.0
    strict_fields: bool = False

    def __post_init__(self) -> None:
        counts = (
            "max_frame_bytes",
            "max_streams",
            "max_connections",
            "max_connections_per_client",
            "max_requests_per_client",
            "max_queue_bytes",
            "max_queued_tokens",
            "max_tokens_per_client",
        )
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} is {value}; legal is at least 1")
        for name in ("request_timeout_s", "first_token_timeout_s", "refusals_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SpecError(f"{name} is {value}; legal is above 0, or None")
        if not -MAX_PRIORITY <= self.min_priority <= MAX_PRIORITY:
            raise SpecError(f"min_priority is {self.min_priority}; legal is -{MAX_PRIORITY} to {MAX_PRIORITY}")

    def connections(self, max_running: int) -> tuple[int, int]:
        """Connections that may be open at once, of all clients and of one address.

        Args:
            max_running: requests that can run at once. By default an address may have a connection for each, and one that waits behind it.
        """
        of_one = self.max_connections_per_client or max(LEAST_CONNECTIONS, 2 * max_running)
        return self.max_connections or max(4 * LEAST_CONNECTIONS, 8 * max_running, of_one), of_one

    def check_priority(self, priority: int) -> None:
        """Raises RequestError where a request is more urgent than it may be."""
        if not self.min_priority <= priority <= MAX_PRIORITY:
            legal = f"legal is {self.min_priority} to {MAX_PRIORITY}, and lower is served first"
            raise RequestError(f"priority is {priority}; {legal} (`npucompile serve --min-priority`)", param="priority")

    def timeout_ms(self, wanted_ms: float | None) -> float | None:
        """How long a request that wants to may wait and run.

        Raises:
            RequestError: it wants more than it may.
        """
        most_ms = None if self.request_timeout_s is None else 1e3 * self.request_timeout_s
        if wanted_ms is None or most_ms is None:
            return most_ms if wanted_ms is None else wanted_ms
        if wanted_ms > most_ms:
            raise RequestError(f"timeout_ms is {wanted_ms}; legal is up to {most_ms:.0f}, the server's own timeout", param="timeout_ms")
        return wanted_ms

    @property
    def transport_frame_bytes(self) -> int:
        """Frame size at which the transport closes the socket; above max_frame_bytes, so that most oversized frames get an error event."""
        return 2 * (self.max_frame_bytes or MAX_FRAME_BYTES)

    def frame_bytes(self, max_model_len: int) -> int:
        """Size of the largest legal frame: what a prompt that fills the context takes, within bounds."""
        if self.max_frame_bytes is not None:
            return self.max_frame_bytes
        return min(MAX_FRAME_BYTES, max(LEAST_FRAME_BYTES, BYTES_PER_TOKEN * max_model_len))
