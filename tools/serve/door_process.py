"""The door as the process that steps has it: started beside it, opened when the engine is loaded, and started again where it ends."""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...runtime.channel import Channel
from ...runtime.engine_host import EngineHost
from ...runtime.executor import ExecutorFacts
from ...runtime.request import Request
from ...server.grammar.compiler import GrammarCompiler, GrammarSource
from ...server.run import POLL_S, Stop, listen, websocket_url
from .artifact_tokenizer import codec_of
from .door import DoorSettings, End, Failed, Open, Opened
from .serving import StartedEngine

log = logging.getLogger(__name__)

END_S = 10.0
"""How long a door has to close its sockets once it has nothing more to wait for."""


class DoorProcess:
    """A door, in a `with`; the port is bound from the start, and answers once the process has imported what it needs.

    Attributes:
        url: of its websocket.

    Args:
        port: 0 takes a free one.
        environment: of the process.

    Raises:
        SpecError: the address cannot be listened on.
    """

    def __init__(self, settings: DoorSettings, port: int, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, dict(environment)
        self._listener = listen(settings.host, port)
        self.url = websocket_url(settings.host, self._listener.getsockname()[1], settings.serving.tls_cert is not None)
        self._answers: SimpleQueue[Opened | Failed] = SimpleQueue()
        self._host: EngineHost | None = None
        self._opens: Callable[[], None] | None = None
        self._give_up: Callable[[str], None] = lambda _: None
        self._serves = self._ending = False
        self._start()

    def __enter__(self) -> DoorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process at once, if it has not ended."""
        self._end(now=True)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()

    @property
    def pid(self) -> int:
        """Of the process that listens now."""
        return self._process.pid

    def open(self, artifact: Artifact, started: StartedEngine) -> Opened:
        """Lets requests in; returns when they are served.

        Raises:
            NpucompileError: the door cannot serve the artifact, or has ended.
        """
        grammars = GrammarCompiler(codec_of(artifact).library, frozenset(artifact.manifest.model["eos_ids"]))

        def revive(request: Request) -> Request:
            source: Any = request.constraint
            return replace(request, constraint=grammars.revived(source)) if isinstance(source, GrammarSource) else request

        def opens() -> None:
            self._host = EngineHost(started.engine, self._channel, started.readiness, revive)
            self._channel.send(Open(artifact, ExecutorFacts.of(started.engine.executor)))

        self._opens = opens
        opens()
        answer = self._answers.get()
        if isinstance(answer, Failed):
            raise NpucompileError(answer.message)
        self._give_up = started.engine.give_up
        return answer

    def wait(self, stop: Stop, failed: Callable[[], bool]) -> None:
        """Waits until the server is to end or has failed; then until the door has drained, unless it failed or a second signal comes."""
        while not (stop.wanted or failed()):
            time.sleep(POLL_S)
        self._end(now=failed())
        while self._process.poll() is None and not (stop.forced or failed()):
            time.sleep(POLL_S)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # Not -m: its records would be those of another module to the process that reads them.
        command = [sys.executable, "-c", "from npucompile.tools.serve.door import main; main()"]
        command += [str(theirs.fileno()), str(self._listener.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=self._environment, pass_fds=(theirs.fileno(), self._listener.fileno()), stdin=subprocess.DEVNULL
            )
        connection = Connection(ours.detach())
        connection.send_bytes(pickle.dumps(self._settings))
        self._channel = Channel(connection, self._take, lambda: None)
        self._channel.start()
        threading.Thread(target=self._watch, args=(self._process,), name="npucompile-door", daemon=True).start()

    def _take(self, record: Any) -> None:
        if isinstance(record, Opened | Failed):
            self._serves = isinstance(record, Opened)
            self._answers.put(record)
        elif self._host:
            self._host.take(record)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._ending:
            return
        if self._host:
            self._host.close()
        if not self._serves:
            # Another one would end as this one did.
            why = f"the process that speaks with clients ended with status {status} before it served any; see above"
            self._answers.put(Failed(why))
            self._give_up(why)
            return
        self._serves = False
        log.error("the process that speaks with clients ended with status %d; its streams are lost, and another one begins", status)
        self._start()
        if self._opens:
            self._opens()

    def _end(self, *, now: bool) -> None:
        self._ending = True
        self._channel.send(End(now))
