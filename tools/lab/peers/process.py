"""Runs an engine in a process of its own, which is stopped while nothing is asked of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...child_process import TAIL_CHARACTERS, ChildError, ChildProcess

PATIENCE_S = 900.0
"""How long an answer may take; compiling a model at its first load takes minutes."""


class PeerError(ChildError):
    """An engine could not be measured; the message is the reason in its row."""


class NotInstalled(PeerError):
    """The interpreter does not have the engine."""


class PeerProcess(ChildProcess):
    """A child that speaks the protocol of loop.py. While it owes no answer all its threads are stopped: none spins beside another engine.

    Attributes:
        version: of the engine.

    Args:
        command: starts it.
        environment: all its variables.

    Raises:
        NotInstalled: the engine is not installed there.
        PeerError: it cannot be started, or answers something else.
    """

    error: ClassVar[type[ChildError]] = PeerError

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment)
        try:
            hello = self.receive(PATIENCE_S)
            if "missing" in hello:
                raise NotInstalled(f"{command[0]}: {hello['missing']}")
            if "version" not in hello:
                raise PeerError(f"{command[0]} began with {hello}; legal is its version")
            self.version = str(hello["version"])
            self.signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request; returns the answer.

        Raises:
            PeerError: it failed, with what the engine said.
        """
        self.signal(signal.SIGCONT)
        try:
            self.send(do=do, **arguments)
            reply = self.receive(PATIENCE_S)
        finally:
            self.signal(signal.SIGSTOP)
        if "error" in reply:
            raise PeerError(" ".join(str(reply["error"]).split())[-TAIL_CHARACTERS:])
        return reply
