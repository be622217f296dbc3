"""Runs an engine in a process of its own, which is stopped while nothing is asked of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from ....graphs.errors import NpucompileError

PATIENCE_S = 900.0
"""How long an answer may take; compiling a model at its first load takes minutes."""

TAIL_CHARACTERS = 600


class PeerError(NpucompileError):
    """An engine could not be measured; the message is the reason in its row."""


class NotInstalled(PeerError):
    """The interpreter does not have the engine."""


class PeerProcess:
    """A child that speaks the protocol of loop.py. While it owes no answer all its threads are stopped: none spins beside another engine.

    Attributes:
        version: of the engine.

    Args:
        command: starts it.
        environment: all its variables.
        patience_s: how long an answer may take.

    Raises:
        NotInstalled: the engine is not installed there.
        PeerError: it cannot be started, or answers something else.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], patience_s: float = PATIENCE_S) -> None:
        self._command, self._patience_s = command, patience_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                # A group of its own, so that processes it starts are stopped with it.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{command[0]} cannot be started: {error.strerror}") from None
        try:
            hello = self._receive()
            if "missing" in hello:
                raise NotInstalled(f"{command[0]}: {hello['missing']}")
            if "version" not in hello:
                raise PeerError(f"{command[0]} began with {hello}; legal is its version")
            self.version = str(hello["version"])
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request; returns the answer.

        Raises:
            PeerError: it failed, with what the engine said.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._ended() from None
            reply = self._receive()
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise PeerError(" ".join(str(reply["error"]).split())[-TAIL_CHARACTERS:])
        return reply

    def close(self) -> None:
        """Ends it."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._patience_s)[0]:
            raise PeerError(f"{self._command[0]} did not answer within {self._patience_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        try:
            reply = json.loads(line)
        except json.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            raise PeerError(f"{self._command[0]} answered {line[:TAIL_CHARACTERS]!r}; legal is one JSON object a line")
        return reply

    def _ended(self) -> PeerError:
        """An error that says how the process ended."""
        status = self._process.wait()
        self._log.seek(0)
        said = " ".join(self._log.read().split())[-TAIL_CHARACTERS:]
        return PeerError(f"{self._command[0]} ended with status {status}" + (f": {said}" if said else ""))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
