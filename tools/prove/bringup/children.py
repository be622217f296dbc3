"""Asks processes with a device to judge cases, one process after another: what ends one is the finding of the case that it was about."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ....lowering.artifact.artifact import Artifact
from ...child_process import ChildError, ChildProcess
from ...ranks.rank_settings import RankSettings
from .child import END_S, ChildWork
from .results import BringupFailure, BringupFinding

MOST_STARTS = 2
"""How often a process may end without having judged anything, before nothing more is tried."""


class Remaining(Protocol):
    """What is left to do."""

    def __call__(self) -> ChildWork | None:
        """The work without the cases that have been judged; None where there is none."""
        ...


class Children:
    """Processes with a device, of which there is one at a time; this one opens none.

    Attributes:
        version: of the device; "" until one was opened.
        add: called with each finding.

    Args:
        index: number of the device on this machine.
        limit_s: how long a process may say nothing.
        scratch: directory for what they are asked.
    """

    def __init__(
        self,
        artifact: Artifact,
        settings: RankSettings,
        index: int,
        environment: Mapping[str, str],
        limit_s: float,
        scratch: Path,
        add: Callable[[BringupFinding], None],
    ) -> None:
        self._environment, self._limit_s, self._scratch, self.add = environment, limit_s, scratch, add
        self._setup = scratch / "setup"
        self._setup.write_bytes(pickle.dumps((artifact.path, settings, index)))
        self._child: ChildProcess | None = None
        self.version = ""

    def run(self, remaining: Remaining, rung: str) -> bool:
        """Has all work done, by as many processes as it takes.

        Args:
            rung: which fails where no process comes as far as a case.

        Returns:
            Whether it was done.
        """
        idle = 0
        while (work := remaining()) is not None:
            judged, error = self._ask(work)
            if error is None:
                return True
            idle = 0 if judged else idle + 1
            if idle == MOST_STARTS:
                self.add(BringupFinding(rung, "opening the device", failures=[BringupFailure.of("device", "opening the device", error)]))
                return False
        return True

    def close(self) -> None:
        """Lets the process end, and with it the device be closed."""
        if self._child is not None:
            self._child.end(END_S + 1)
            self._child = None

    def kill(self) -> None:
        """Ends the process at once."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, work: ChildWork) -> tuple[int, ChildError | None]:
        """How many cases a process judged, and why it can do no more."""
        judged, running, began = 0, dict[str, Any](), time.monotonic()
        path = self._scratch / "work"
        # Unlike pickle, torch has a form for tensors of every dtype.
        torch.save(work, path)
        try:
            if self._child is None:
                self._child = ChildProcess([sys.executable, "-m", f"{__package__}.child", str(self._setup)], self._environment)
            self._child.send(work=str(path))
            while "done" not in (line := self._child.receive(self._limit_s)):
                self.version = line.get("version", self.version)
                if "begins" in line:
                    running, began = line, time.monotonic()
                elif "judged" in line:
                    judged, running = judged + 1, {}
                    self.add(BringupFinding.from_dict(line["judged"]))
                    if line["spent"]:
                        self.close()
                        return judged, ChildError("the device can run no more")
        except ChildError as error:
            self.kill()
            if running:
                failure = BringupFailure.of(running["assumption"], running["begins"], error)
                self.add(BringupFinding(running["rung"], running["begins"], time.monotonic() - began, [failure]))
            return judged + bool(running), error
        return judged, None
