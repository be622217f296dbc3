"""Runs the server in a thread of this process, from the moment that it listens to the moment that its last stream has ended."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

from ..graphs.errors import NpucompileError, SpecError
from .app import create_app
from .client import WEBSOCKET_PATH
from .engine.lifecycle import Lifecycle
from .engine.service import Service
from .guard.access import Access
from .guard.connections import Connections
from .guard.limits import SocketLimits
from .socket.transport import protocols
from .telemetry.access_log import AccessLog

GRACE_S = 5
"""How long sockets may take to close after the last stream has ended before their tasks are cancelled."""

KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep theirs (httpx 5 s, aiohttp 15 s, proxies 60 s): whoever closes first must
not be the server, or a request that is on its way then is lost."""

UNREAD_MS = 60_000
"""How long sent bytes may lie unread by a client before the kernel drops the connection."""

BACKLOG = 1024
MAX_OPEN_FILES = 2**16
POLL_S = 0.05


@dataclass(frozen=True)
class Serving:
    """How a server serves.

    Attributes:
        tls_cert, tls_key: PEM files; with a certificate the server speaks TLS alone. The key may be in the certificate's file.
        drain_notice_s: how long a server that was told to end is not ready and still takes requests: until whoever sends them has asked.
        drain_timeout_s: how long streams may go on after the server was told to end.
        access_log: gets a line for every exchange and socket.
    """

    limits: SocketLimits = field(default_factory=SocketLimits)
    access: Access = field(default_factory=Access)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    drain_timeout_s: float = 30.0
    drain_notice_s: float = 0.0
    access_log: AccessLog | None = None


def serve(
    served: Service,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    settings: Serving | None = None,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serves until one of SIGNALS; then drains, closes every socket with 1012 and returns.

    Call it on the main thread, which is where signals arrive.

    Args:
        port: 0 takes a free one.
        on_ready: called with host and port once connections are accepted.

    Raises:
        SpecError: the address cannot be listened on.
    """
    with Stop() as stop, running(served, host, port, settings=settings) as server:
        if on_ready:
            on_ready(host, server.port)
        server.wait(stop)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal that is closed sends the last; who started the server under `nohup` has it ignored, which stays so."""


class Stop:
    """Notes SIGNALS in a `with` on the main thread.

    Attributes:
        raises: whether a signal also ends whatever runs, as KeyboardInterrupt.
        wanted: the server is to end.
        forced: it is to end at once: there was a second signal.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self.wanted = self.forced = False
        self.raises = raises
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stop:
        heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, _: int, __: FrameType | None) -> None:
        self.forced, self.wanted = self.wanted, True
        if self.raises:
            raise KeyboardInterrupt


class RunningServer:
    """A server that accepts connections.

    Attributes:
        url: of its websocket.
        port: that it listens on.
        loop: of its thread.
        lifecycle: a service set there is served from then on.
    """

    def __init__(self, server: _Server, thread: threading.Thread, lifecycle: Lifecycle, url: str, port: int, settings: Serving) -> None:
        self.url, self.port, self.lifecycle, self.loop = url, port, lifecycle, server.loop
        self._server, self._thread, self._settings = server, thread, settings

    def wait(self, stop: Stop, failed: Callable[[], bool] = lambda: False) -> None:
        """Waits until the server is to end or has failed; then drains, unless it failed or a second signal comes."""
        while not (stop.wanted or failed()) and self._thread.is_alive():
            time.sleep(POLL_S)
        self.lifecycle.leaving = True
        noticed = time.monotonic() + self._settings.drain_notice_s
        while time.monotonic() < noticed and not (stop.forced or failed()):
            time.sleep(POLL_S)
        self.lifecycle.draining = True
        service = self.lifecycle.service
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while service and service.busy and time.monotonic() < deadline and not (stop.forced or failed()):
            time.sleep(POLL_S)
        if service:
            service.ending = True

    def close(self, grace_s: float = GRACE_S) -> None:
        """Closes every socket and ends the thread."""
        self._server.config.timeout_graceful_shutdown = int(grace_s)
        self._server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def serving(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    limits: SocketLimits | None = None,
    access_log: AccessLog | None = None,
) -> Iterator[str]:
    """Serves from a thread of this process for the length of a `with`; yields the websocket's URL.

    Raises:
        SpecError: the address cannot be listened on.
    """
    with running(service, host, port, settings=Serving(limits or SocketLimits(), access_log=access_log)) as server:
        yield server.url


@contextlib.contextmanager
def running(
    served: Service | Lifecycle,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    settings: Serving | None = None,
    listener: socket.socket | None = None,
) -> Iterator[RunningServer]:
    """Serves from a thread of this process for the length of a `with`.

    Args:
        listener: made by `listen` for this host; None makes one.

    Raises:
        SpecError: the address cannot be listened on, or the certificate cannot be used.
    """
    settings = settings or Serving()
    lifecycle = Lifecycle(served) if isinstance(served, Service) else served
    ready = threading.Event()
    with listener or listen(host, port) as bound:
        server = _Server(_config(lifecycle, settings), ready.set)

        def run() -> None:
            try:
                server.run(sockets=[bound])
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="npucompile-server", daemon=True)
        thread.start()
        number = bound.getsockname()[1]
        url = websocket_url(host, number, settings.tls_cert is not None)
        ready.wait()
        answer = RunningServer(server, thread, lifecycle, url, number, settings)
        try:
            if not server.started:
                raise NpucompileError(f"the server on {host}:{port} ended before it was ready; the log has the reason")
            yield answer
        finally:
            answer.close()


def websocket_url(host: str, port: int, tls: bool = False) -> str:
    """URL of the websocket."""
    return f"{'wss' if tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}{WEBSOCKET_PATH}"


def listen_shared(host: str, port: int, count: int) -> tuple[socket.socket, ...]:
    """Sockets that listen at one address, for a process each; the kernel spreads connections over them.

    Who made them keeps them open, so that connections wait for a process that is started again. One socket for all would not spread: who
    accepts first takes what is there, of 64 connections at once 31 to 59 in four processes, where these take 18 or 19.

    Raises:
        SpecError: the address cannot be listened on.
    """
    # Those that share an address do not refuse another server of the same user there, and one that shares it with none does.
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    return tuple(listen(host, port, shared=True) for _ in range(count))


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens: from now on the port is taken, and connections wait to be accepted.

    Args:
        shared: with others of this user.

    Raises:
        SpecError: the address cannot be listened on.
    """
    if not 0 <= port <= 65535:
        raise SpecError(f"cannot listen on {host} port {port}; legal are ports 0 to 65535, 0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise SpecError(f"cannot listen on {host} port {port}: {error}; legal is an address of this machine and a free port") from error
    # Accepted sockets inherit it. asyncio sets it on sockets that name their protocol, which those of `create_server` do not; without it
    # a small write waits for the acknowledgement of the one before it, some 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        # Accepted sockets inherit it. Without it a client that never reads keeps its socket open after the server has closed it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener


def allow_open_files() -> None:
    """Lets this process have as many connections and files open as its user may, up to MAX_OPEN_FILES; many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _config(lifecycle: Lifecycle, settings: Serving) -> uvicorn.Config:
    limits = settings.limits

    def most() -> tuple[int, int]:
        return limits.connections(lifecycle.service.model.max_running if lifecycle.service else 1)

    def frame_bytes() -> int:
        return limits.transport_frame_bytes + (lifecycle.service.picture_bytes if lifecycle.service else 0)

    http, websocket = protocols(Connections(most, settings.access.trusts, lifecycle.connections), limits.handshake_s, frame_bytes)
    app = create_app(lifecycle, limits, settings.access)
    config = uvicorn.Config(
        settings.access_log.around(app) if settings.access_log else app,
        http=http,
        ws=websocket,
        # Deltas are too small for compression to pay.
        ws_per_message_deflate=False,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        # Anybody else who connects could name another address as its own.
        proxy_headers=bool(settings.access.proxies),
        forwarded_allow_ips=list(map(str, settings.access.proxies)),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    try:
        config.load()
    except OSError as error:
        raise SpecError(
            f"TLS certificate {settings.tls_cert} with key {settings.tls_key or 'in the same file'}: {error}; legal are PEM files"
        ) from error
    return config
