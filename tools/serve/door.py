"""The process that speaks with clients, where that is not the one that steps: HTTP, websockets, tokenising, parsers, grammars, pictures.

It is started by `door_process.DoorProcess`, listens on a socket that it inherits, and ends when that process does.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...runtime.channel import Channel
from ...runtime.executor import ExecutorFacts
from ...server.engine.lifecycle import Lifecycle
from ...server.engine.remote_engine import RemoteEngine
from ...server.engine.service import Service
from ...server.pictures.limits import MediaLimits
from ...server.response import kept
from ...server.run import SIGNALS, RunningServer, Serving, Stop, allow_open_files, running
from ...server.siblings.records import Place
from ...server.siblings.siblings import Siblings
from ...server.telemetry.access_log import AccessLog
from ...server.telemetry.tracing import Tracing
from .api_settings import ApiSettings
from .artifact_tokenizer import codec_of
from .served import calm_collector, said_of_ends, service_of
from .vision import said_of_pictures


class DoorSettings(NamedTuple):
    """What a door does from its start on.

    Attributes:
        serving: without an access log.
        access_log: its file; "-" is standard output, None none.
        traces: where spans are sent; None nowhere.
        place: among several; None where there is one.
    """

    host: str
    serving: Serving
    api: ApiSettings
    media: MediaLimits
    access_log: str | None = None
    traces: str | None = None
    verbose: bool = False
    place: Place | None = None


class Open(NamedTuple):
    """The engine is loaded: requests may come."""

    artifact: Artifact
    executor: ExecutorFacts


class Opened(NamedTuple):
    """Requests are served under this name; `notes` say what a user may want to know."""

    name: str
    notes: tuple[str, ...]


class DoorFailed(NamedTuple):
    """Why none can be."""

    message: str


class End(NamedTuple):
    """The server is to end: after it has drained, or `now`."""

    now: bool


class EngineLink(Stop):
    """What the reading thread hands to the main one; it is stopped by records in the place of signals.

    Attributes:
        engine: that of the other process, once it is loaded.
        told: Open, or End where that comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine: RemoteEngine | None = None
        self.told: SimpleQueue[Open | End] = SimpleQueue()

    def take(self, record: Any) -> None:
        """Takes a record of the other process."""
        if isinstance(record, Open):
            self.told.put(record)
        elif isinstance(record, End):
            self.wanted, self.forced = True, self.forced or record.now
            self.told.put(record)
        elif self.engine:
            self.engine.take(record)


def serve(settings: DoorSettings, listener: socket.socket, connection: Connection) -> None:
    """Serves until the other process says that it ends."""
    # A signal to the group is the other process's to answer; if it ends, so does this one.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    allow_open_files()
    door = EngineLink()
    channel = Channel(connection, door.take, lambda: os._exit(1))
    file = settings.access_log
    with (
        ExitStack() as last,
        nullcontext() if file is None else AccessLog.opened(None if file == "-" else Path(file)) as access,
        running(Lifecycle(), settings.host, settings=replace(settings.serving, access_log=access), listener=listener) as server,
        ExitStack() as stack,
    ):
        channel.start()
        calm_collector()
        opened = door.told.get()
        if isinstance(opened, End):
            return
        try:
            engine = door.engine = RemoteEngine(channel.send, opened.executor)
            service = _service(settings, opened, engine, stack)
            if settings.traces:
                service.tracing = Tracing.to(settings.traces)
                service.tracing.model = service.model.name
                last.callback(service.tracing.close)
        except NpucompileError as error:
            channel.send(DoorFailed(str(error)))
            channel.close()
            return
        if access:
            engine.on_end = access.ended
        if settings.place:
            join(settings.place, service, server)
            assert service.siblings
            stack.callback(service.siblings.close)
        server.lifecycle.service = service
        if service.siblings:
            service.siblings.start()
        notes = (said_of_ends(service), *said_of_pictures(service), *settings.api.said_of_sampling(opened.artifact))
        channel.send(Opened(service.model.name, notes))
        server.wait(door)


def join(place: Place, service: Service, server: RunningServer) -> None:
    """Makes this door one of several."""
    lifecycle = server.lifecycle
    tallies = {"connections": lifecycle.connections, "bodies": lifecycle.bodies, **service.admission.tallies}
    assert server.loop
    service.siblings = Siblings(place, server.loop, {**lifecycle.methods, **kept.methods(service)}, tallies)
    service.tenant_key = place.key


def _service(settings: DoorSettings, opened: Open, engine: RemoteEngine, stack: ExitStack) -> Service:
    artifact, codec = opened.artifact, codec_of(opened.artifact)
    chat, groups, limits = settings.api.chat_of(artifact), opened.executor.groups, settings.serving.limits
    service = service_of(engine, artifact, codec, settings.api, chat, groups, engine.health, limits, settings.media)
    if service.pictures:
        stack.callback(service.pictures.close)
    return service


def main() -> None:
    """Takes numbers of the connection and the listening socket from the command line."""
    connection, listener = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    serve(pickle.loads(connection.recv_bytes()), listener, connection)
