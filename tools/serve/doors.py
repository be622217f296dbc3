"""The doors of a server, as the process that steps has them: one address, and a process each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ...lowering.artifact.artifact import Artifact
from ...runtime.request import Request
from ...server.grammar.compiler import GrammarCompiler, GrammarSource
from ...server.run import POLL_S, Stop, listen, listen_shared, websocket_url
from ...server.siblings.records import Place
from .artifact_tokenizer import codec_of
from .door import DoorSettings, Opened
from .door_process import DoorProcess
from .serving import StartedEngine


class Doors:
    """Doors, in a `with`; the port is bound from the start, and answers once a process has imported what it needs.

    Each is watched, and started again, alone. What is kept and what decodes pictures is divided among them.

    Attributes:
        url: of their websocket.

    Args:
        port: 0 takes a free one.
        count: of them.
        environment: of the processes.

    Raises:
        SpecError: the address cannot be listened on.
    """

    def __init__(self, settings: DoorSettings, port: int, count: int, environment: Mapping[str, str]) -> None:
        with ExitStack() as stack:
            listeners = listen_shared(settings.host, port, count) if count > 1 else (listen(settings.host, port),)
            for listener in listeners:
                stack.enter_context(listener)
            name, key = f"npucompile-{secrets.token_hex(8)}", secrets.token_bytes(32)
            places = [Place(number, count, name, key) for number in range(count)] if count > 1 else [None]
            self.url = websocket_url(settings.host, listeners[0].getsockname()[1], settings.serving.tls_cert is not None)
            own = [shared(settings, count)._replace(place=place) for place in places]
            self._doors = [DoorProcess(each, listener, environment) for each, listener in zip(own, listeners, strict=True)]
            self._stack = stack.pop_all()

    def __enter__(self) -> Doors:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes at once, if they have not ended."""
        with self._stack:
            for door in self._doors:
                door.end(now=True)
            for door in self._doors:
                door.join()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that listen now."""
        return tuple(door.pid for door in self._doors)

    def open(self, artifact: Artifact, started: StartedEngine) -> Opened:
        """Lets requests in; returns when all doors serve them.

        Raises:
            NpucompileError: a door cannot serve the artifact, or has ended.
        """
        grammars = GrammarCompiler(codec_of(artifact).library, frozenset(artifact.manifest.model["eos_ids"]))

        def revive(request: Request) -> Request:
            source: Any = request.constraint
            return replace(request, constraint=grammars.revived(source)) if isinstance(source, GrammarSource) else request

        for door in self._doors:
            door.open(artifact, started, revive)
        first, *_ = [door.opened() for door in self._doors]
        return first

    def wait(self, stop: Stop, failed: Callable[[], bool]) -> None:
        """Waits until the server is to end or has failed; then until the doors have drained, unless it failed or a second signal comes."""
        while not (stop.wanted or failed()):
            time.sleep(POLL_S)
        for door in self._doors:
            door.end(now=failed())
        while any(door.alive for door in self._doors) and not (stop.forced or failed()):
            time.sleep(POLL_S)


def shared(settings: DoorSettings, count: int) -> DoorSettings:
    """Settings of one of so many doors: what each would hold for itself is divided. Limits of clients are of all doors together."""
    serving, media = settings.serving, settings.media
    limits = replace(serving.limits, max_stored_bytes=-(-serving.limits.max_stored_bytes // count))
    decoders = replace(media.decoders, processes=-(-media.decoders.processes // count))
    return settings._replace(serving=replace(serving, limits=limits), media=replace(media, decoders=decoders))
