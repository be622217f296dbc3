"""The connection to one other rank: messages both ways, and one callback with the reason when it is lost.

A thread reads, so that the end of the other rank is seen while this process waits in a collective or for a request. The thread also
sends a heartbeat every second; a rank whose machine or network is gone closes nothing, and is lost when its heartbeats stop. Sooner,
where the system tells it: a machine that is there acknowledges heartbeats even if the process that they are for cannot read them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from .messages import FrameDecoder, RankMessage, encode

HEARTBEAT_S = 1.0
SILENCE_S = 20.0
"""How long a peer may send nothing, not even a heartbeat, before it counts as lost."""

GONE_S = 8.0
"""How long a machine may acknowledge nothing of what was sent to it; a switch that takes over needs less."""

TCP_INFO_BYTES, RETRANSMITS, LAST_ACK_MS = 60, struct.Struct("2xB"), struct.Struct("56xI")
"""Of Linux's `struct tcp_info`: how often unacknowledged bytes were sent again, and milliseconds since the last acknowledgement."""

READ_BYTES = 1 << 18
CLOSED = "it closed its connection"
HEARTBEAT = "heartbeat"
"""Kind of the message that keeps a connection alive."""


class RankPeer:
    """Another rank. `send` may be called from any thread; both callbacks come from the reading thread.

    Args:
        stream: connected; closed by `close`.
        on_message: called with every message but heartbeats, in order.
        on_lost: called at most once, with the reason, when the other rank is gone and `close` was not called.
        silence_s: how long the other rank may be silent.
        heartbeat_s: time between two heartbeats sent.
    """

    def __init__(
        self,
        stream: socket.socket,
        on_message: Callable[[RankMessage], None],
        on_lost: Callable[[str], None],
        *,
        silence_s: float = SILENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._stream, self._on_message, self._on_lost = stream, on_message, on_lost
        self._silence_s, self._heartbeat_s = silence_s, heartbeat_s
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._ended = False
        self._received_s = time.monotonic()
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A send blocks while the other rank does not read; that counts as silence as well.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6)))
        self._thread = threading.Thread(target=self._read, name="npucompile-peer", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since anything was received."""
        return time.monotonic() - self._received_s

    def start(self) -> None:
        """Starts to read; no callback is called before."""
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message; a lost connection is reported to `on_lost`, not raised."""
        self.send_frame(encode(kind, **fields))

    def send_frame(self, frame: bytes) -> None:
        """Sends a frame of `messages.encode`, as `send` does."""
        try:
            with self._sending:
                self._stream.sendall(frame)
        except OSError as error:
            self._end(_reason(error, self._silence_s))

    def close(self) -> None:
        """Closes the connection; `on_lost` is not called for it."""
        with self._state:
            self._ended = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._stream.close()

    def _end(self, reason: str) -> None:
        with self._state:
            first, self._ended = not self._ended, True
        if first:
            self._on_lost(reason)

    def _read(self) -> None:
        try:
            self._read_until_end()
        except Exception as error:
            # Whatever the error, a connection that is no longer read must not look alive.
            self._end(_reason(error, self._silence_s))

    def _read_until_end(self) -> None:
        decoder, poll = FrameDecoder(), select.poll()
        poll.register(self._stream, select.POLLIN)
        self._received_s = sent_s = time.monotonic()
        while not self._ended:
            readable = poll.poll(self._heartbeat_s * 1e3)
            if readable:
                data = self._stream.recv(READ_BYTES)
                if not data:
                    self._end(CLOSED)
                    return
                for message in decoder.feed(data):
                    if message.kind != HEARTBEAT:
                        self._on_message(message)
            now = time.monotonic()
            # Check for silence only after reading: if this process itself was paused, data is waiting in the socket.
            if readable:
                self._received_s = now
            elif self.silent_s > self._silence_s:
                self._end(f"it has been silent for {self.silent_s:.0f} s")
                return
            if now - sent_s >= self._heartbeat_s:
                # Before the next heartbeat, so that there was time to acknowledge the last one.
                if (unanswered_s := unacknowledged_s(self._stream)) > GONE_S:
                    self._end(f"its machine has not answered for {unanswered_s:.0f} s")
                    return
                sent_s = now
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        # A send in progress proves life just as well, and waiting for it would stop the reading.
        if self._sending.acquire(blocking=False):
            try:
                self._stream.sendall(encode(HEARTBEAT))
            finally:
                self._sending.release()


def unacknowledged_s(stream: socket.socket) -> float:
    """Seconds since the other machine last acknowledged anything, while bytes are sent to it again; 0 if none are, or nobody knows."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < TCP_INFO_BYTES or not RETRANSMITS.unpack_from(info)[0]:
        return 0.0
    return float(LAST_ACK_MS.unpack_from(info)[0]) / 1e3


def _reason(error: Exception, silence_s: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"it has read nothing for {silence_s:g} s"
    # A process that ends before it has read all resets its connection; one that was sent something afterwards has a broken pipe.
    return CLOSED if isinstance(error, ConnectionResetError | BrokenPipeError) else f"its connection failed: {error}"
