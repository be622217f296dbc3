"""Runs the server in this process or in a thread of it."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import uvicorn

from ..graphs.errors import NpucompileError, SpecError
from .app import WEBSOCKET_PATH, create_app
from .service import Service
from .websocket import SocketLimits

GRACE_S = 5
"""How long sockets may take to close after a signal before their tasks are cancelled."""

UNREAD_MS = 60_000
"""How long sent bytes may lie unread by a client before the kernel drops the connection."""

BACKLOG = 1024


def serve(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    limits: SocketLimits | None = None,
    max_frame_bytes: int | None = None,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then closes every socket with 1012 and returns.

    Call it on the main thread, which is where signals arrive.

    Args:
        port: 0 takes a free one.
        max_frame_bytes: overrides the one in `limits`.
        on_ready: called with host and port once connections are accepted.

    Raises:
        SpecError: the address cannot be listened on.
    """
    with _listen(host, port) as listener:
        _server(service, host, listener, limits, max_frame_bytes, on_ready).run(sockets=[listener])


@contextlib.contextmanager
def serving(service: Service, host: str = "127.0.0.1", port: int = 0, *, limits: SocketLimits | None = None) -> Iterator[str]:
    """Serves from a thread of this process for the length of a `with`; yields the websocket's URL.

    Raises:
        SpecError: the address cannot be listened on.
    """
    ready = threading.Event()
    with _listen(host, port) as listener:
        server = _server(service, host, listener, limits, None, lambda *_: ready.set())

        def run() -> None:
            try:
                server.run(sockets=[listener])
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="npucompile-server", daemon=True)
        thread.start()
        try:
            ready.wait()
            if not server.started:
                raise NpucompileError(f"the server on {host}:{port} ended before it was ready; the log has the reason")
            yield websocket_url(host, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def websocket_url(host: str, port: int) -> str:
    """URL of the websocket."""
    return f"ws://{f'[{host}]' if ':' in host else host}:{port}{WEBSOCKET_PATH}"


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready, and whose `run` returns on a signal instead of ending the process."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        # A second Ctrl-C exits without waiting for clients.
        self.force_exit = self.force_exit or (self.should_exit and number == signal.SIGINT)
        self.should_exit = True


def _server(
    service: Service,
    host: str,
    listener: socket.socket,
    limits: SocketLimits | None,
    max_frame_bytes: int | None,
    on_ready: Callable[[str, int], None] | None,
) -> _Server:
    limits = limits or SocketLimits()
    if max_frame_bytes is not None:
        limits = replace(limits, max_frame_bytes=max_frame_bytes)
    config = uvicorn.Config(
        create_app(service, limits),
        # uvicorn's "websockets" implementation uses a deprecated interface of that library.
        ws="websockets-sansio",
        ws_max_size=limits.transport_frame_bytes,
        # Deltas are too small for compression to pay.
        ws_per_message_deflate=False,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    port = listener.getsockname()[1]
    return _Server(config, lambda: on_ready(host, port) if on_ready else None)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise SpecError(f"cannot listen on {host} port {port}; legal are ports 0 to 65535, 0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SpecError(f"cannot listen on {host} port {port}: {error}; legal is an address of this machine and a free port") from error
    if sys.platform == "linux":
        # Accepted sockets inherit it. Without it a client that never reads keeps its socket open after the server has closed it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener
