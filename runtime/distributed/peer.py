"""Turns a connected socket into messages both ways, and its end into one call that says why.

A thread reads, so that a peer's end is seen while this process waits for something else: a collective, or a request. It also
sends a beat every second, so that a peer whose machine or network is gone, and that closes nothing, is missed too.
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

from .messages import Frames, Message, encode

BEAT_S = 1.0
SILENCE_S = 20.0
"""How long a peer may send nothing, not even a beat, before it counts as lost."""

READ_BYTES = 1 << 18
BEAT = "beat"


class Link:
    """One peer. `send` may be called from any thread; both callbacks come from the reading thread.

    Args:
        stream: connected; the link closes it.
        on_message: called with every message but beats, in order.
        on_lost: called at most once, with what happened, when the peer is gone and `close` was not called.
        silence_s: how long the peer may be silent.
        beat_s: how often a beat is sent.
    """

    def __init__(
        self,
        stream: socket.socket,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        silence_s: float = SILENCE_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._stream, self._on_message, self._on_lost = stream, on_message, on_lost
        self._silence_s, self._beat_s = silence_s, beat_s
        self._sending = threading.Lock()
        self._ended = threading.Lock()
        self._over = False
        self._heard = time.monotonic()
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Sending blocks when a peer no longer reads; that is silence as well.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6)))
        self._thread = threading.Thread(target=self._read, name="npucompile-link", daemon=True)

    @property
    def silent_s(self) -> float:
        """How long nothing has come, not even a beat."""
        return time.monotonic() - self._heard

    def start(self) -> None:
        """Begins to read; nothing is called before."""
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message; a peer that is gone is told to `on_lost`, not raised."""
        self.send_frame(encode(kind, **fields))

    def send_frame(self, frame: bytes) -> None:
        """Sends what `wire.encode` made, as `send` does."""
        try:
            with self._sending:
                self._stream.sendall(frame)
        except OSError as error:
            self._end(_said(error, self._silence_s))

    def close(self) -> None:
        """Ends the link from this side; `on_lost` is not called for it."""
        with self._ended:
            self._over = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._stream.close()

    def _end(self, reason: str) -> None:
        with self._ended:
            first, self._over = not self._over, True
        if first:
            self._on_lost(reason)

    def _read(self) -> None:
        try:
            self._read_until_the_end()
        except Exception as error:
            # Whatever it is, a link that no longer reads must not look alive.
            self._end(_said(error, self._silence_s))

    def _read_until_the_end(self) -> None:
        frames, ready = Frames(), select.poll()
        ready.register(self._stream, select.POLLIN)
        self._heard = beaten = time.monotonic()
        while not self._over:
            arrived = ready.poll(self._beat_s * 1e3)
            if arrived:
                data = self._stream.recv(READ_BYTES)
                if not data:
                    self._end("it closed its connection")
                    return
                for message in frames.feed(data):
                    if message.kind != BEAT:
                        self._on_message(message)
            now = time.monotonic()
            # Read first: after a pause of this process itself, what the peer sent lies there.
            if arrived:
                self._heard = now
            elif self.silent_s > self._silence_s:
                self._end(f"it has been silent for {self.silent_s:.0f} s")
                return
            if now - beaten >= self._beat_s:
                beaten = now
                self._beat()

    def _beat(self) -> None:
        # Whoever is sending proves as much; waiting for them would stop the reading.
        if self._sending.acquire(blocking=False):
            try:
                self._stream.sendall(encode(BEAT))
            finally:
                self._sending.release()


def _said(error: Exception, silence_s: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"it has read nothing for {silence_s:g} s"
    return f"its connection failed: {error}"
