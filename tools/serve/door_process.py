"""A door as the process that steps has it: started beside it, opened when the engine is loaded, and started again where it ends."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...runtime.channel import Channel
from ...runtime.engine_host import EngineHost, Revive
from ...runtime.executor import ExecutorFacts
from .door import DoorFailed, DoorSettings, End, Open, Opened
from .serving import StartedEngine

log = logging.getLogger(__name__)

END_S = 10.0
"""How long a door has to close its sockets once it has nothing more to wait for."""


class DoorProcess:
    """A door, from when it is made; it answers once the process has imported what it needs.

    Args:
        listener: that it accepts from, which stays open here: connections that come while it is started again wait.
        environment: of the process.
    """

    def __init__(self, settings: DoorSettings, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._settings, self._listener, self._environment = settings, listener, dict(environment)
        self._answers: SimpleQueue[Opened | DoorFailed] = SimpleQueue()
        self._host: EngineHost | None = None
        self._opens: Callable[[], None] | None = None
        self._give_up: Callable[[str], None] = lambda _: None
        self._serves = self._ending = False
        self._start()

    @property
    def pid(self) -> int:
        """Of the process that listens now."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def open(self, artifact: Artifact, started: StartedEngine, revive: Revive) -> None:
        """Lets requests in; `opened` waits until they are served."""

        def opens() -> None:
            self._host = EngineHost(started.engine, self._channel, started.readiness, revive)
            self._channel.send(Open(artifact, ExecutorFacts.of(started.engine.executor)))

        self._opens = opens
        self._give_up = started.engine.give_up
        opens()

    def opened(self) -> Opened:
        """Returns when requests are served.

        Raises:
            NpucompileError: the door cannot serve the artifact, or has ended.
        """
        answer = self._answers.get()
        if isinstance(answer, DoorFailed):
            raise NpucompileError(answer.message)
        return answer

    def end(self, *, now: bool) -> None:
        """Tells it to end: after it has drained, or now."""
        self._ending = True
        self._channel.send(End(now))

    def join(self) -> None:
        """Waits for its end, and brings it about where that takes too long."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # Not -m: its records would be those of another module to the process that reads them.
        command = [sys.executable, "-c", "from npucompile.tools.serve.door import main; main()"]
        command += [str(theirs.fileno()), str(self._listener.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=self._environment, pass_fds=(theirs.fileno(), self._listener.fileno()), stdin=subprocess.DEVNULL
            )
        self._channel = Channel(Connection(ours.detach()), self._take, lambda: None)
        self._channel.send(self._settings)
        self._channel.start()
        threading.Thread(target=self._watch, args=(self._process,), name="npucompile-door", daemon=True).start()

    def _take(self, record: Any) -> None:
        if isinstance(record, Opened | DoorFailed):
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
            self._answers.put(DoorFailed(why))
            self._give_up(why)
            return
        self._serves = False
        log.error("the process that speaks with clients ended with status %d; its streams are lost, and another one begins", status)
        self._start()
        if self._opens:
            self._opens()
