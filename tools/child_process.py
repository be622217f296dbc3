"""A process that is asked in JSON lines on its standard input and answers in JSON lines on its standard output."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Self

from ..graphs.errors import NpucompileError

TAIL_CHARACTERS = 600
SILENT = "silent"


class ChildError(NpucompileError):
    """Raised when a child process gives no answer.

    Attributes:
        code: how it ended, as `SIGABRT` or `status 3`; `silent` where it did not answer in time, "" where it answered something else.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ChildProcess:
    """A child in a session of its own, so that processes which it starts end with it. What it prints on standard error is kept.

    Args:
        command: starts it.
        environment: all its variables.

    Raises:
        ChildError: it cannot be started.
    """

    error: ClassVar[type[ChildError]] = ChildError

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._received = command, b""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except OSError as error:
            self._log.close()
            raise self.error(f"{command[0]} cannot be started: {error.strerror}") from None

    def send(self, **request: Any) -> None:
        """Sends one line.

        Raises:
            ChildError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, patience_s: float) -> dict[str, Any]:
        """The next line.

        Raises:
            ChildError: none within that time, or it is no JSON object, or the process has ended; says what it printed.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._received:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self.error(f"{self._command[0]} did not answer within {patience_s:g} s", SILENT)
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise self._ended()
            self._received += read
        line, _, self._received = self._received.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            text = line.decode(errors="replace") + "\n"
            raise self.error(f"{self._command[0]} answered {text[:TAIL_CHARACTERS]!r}; legal is one JSON object a line")
        return reply

    def end(self, within_s: float) -> None:
        """Lets it end by itself, as its standard input does, and ends it by force after that time."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.close()

    def close(self) -> None:
        """Ends it by force, with all that it started."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it and to all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self) -> ChildError:
        """An error that says how the process ended."""
        status = self._process.wait()
        code = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._log.seek(0)
        said = " ".join(self._log.read().split())[-TAIL_CHARACTERS:]
        return self.error(f"{self._command[0]} ended with {code}" + (f": {said}" if said else ""), code)
