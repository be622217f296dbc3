"""The process that has a device: it runs cases and says of each when it begins and what it came to; nobody types its command line."""

from __future__ import annotations

import functools
import json
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import torch

from ....graphs.types import Mesh
from ....lowering.artifact.artifact import Artifact
from ....lowering.platform import Platform
from ...progress import Progress
from ...ranks.rank_settings import RankSettings
from .device_graph import Host
from .results import BringupFailure, BringupFinding, DeviceCase, Judgement

END_S = 5.0
"""How long the device may take to close when nothing is asked any more."""


class Spent(Exception):
    """Raised when the device can run no more."""


class ChildWork(Protocol):
    """What a process with a device is asked to do, pickled."""

    def run(self, child: Child) -> None:
        """Does it; `child` says what came of it."""
        ...


@dataclass(frozen=True)
class Cases:
    """Cases of a rung on one device."""

    rung: str
    cases: tuple[DeviceCase, ...]

    def run(self, child: Child) -> None:
        """Judges them in order."""
        host = child.host
        for case in self.cases:
            child.judge(self.rung, case.name, case.assumption, functools.partial(case.judge, host))


class Child:
    """This process.

    Attributes:
        failed: whether a case has failed.

    Args:
        artifact: whose operator packages the device loads.
        index: number of the device on this machine.
        out: where lines go.
    """

    def __init__(self, artifact: Artifact, settings: RankSettings, index: int, out: TextIO) -> None:
        self.artifact, self.settings, self.failed = artifact, settings, False
        self._index, self._out = index, out
        self._running: tuple[str, str, str, float] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="npucompile-")

    @functools.cached_property
    def host(self) -> Host:
        """The device, opened once; its version is said.

        Raises:
            NpucompileError: there is none, or it lacks operator packages.
        """
        device = self.settings.open_device(self.settings.device, self._index)
        device.load_packages(Platform.of(self.artifact.manifest.platform).packages)
        self.say(version=device.version)
        return Host(device, Path(self._scratch.name), self.settings.step_limit_s, self.settings.off)

    def close(self) -> None:
        """Closes the device."""
        if "host" in self.__dict__:
            self.host.device.close()
        self._scratch.cleanup()

    @property
    def mesh(self) -> Mesh:
        """Of the artifact."""
        return Mesh.parse(self.artifact.manifest.mesh)

    @property
    def progress(self) -> Progress:
        """Says that something moves, and draws nothing."""
        return Moves(self)

    def say(self, **line: Any) -> None:
        """Writes a line."""
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def begin(self, rung: str, case: str, assumption: str) -> None:
        """Says that from now on what happens is about a case."""
        self._running = (rung, case, assumption, time.monotonic())
        self.say(begins=case, rung=rung, assumption=assumption)

    def end(self, judgement: Judgement) -> None:
        """Says what the case came to.

        Raises:
            Spent: the device can run no more.
        """
        assert self._running is not None
        (rung, case, _, began), self._running = self._running, None
        failures, timings, facts, left_out, spent = judgement
        self.failed |= bool(failures)
        finding = BringupFinding(rung, case, time.monotonic() - began, failures, timings, facts, left_out)
        self.say(judged=asdict(finding), spent=spent)
        if spent:
            raise Spent

    def judge(self, rung: str, case: str, assumption: str, run: Callable[[], Judgement]) -> None:
        """Runs a case; whatever it raises is its failure, and the end of this process, since nobody knows what the device can do then."""
        self.begin(rung, case, assumption)
        try:
            judgement = run()
        except Exception as error:
            judgement = self._failed(error)
        self.end(judgement)

    def conclude(self, finding: BringupFinding) -> None:
        """Says what a rung says of itself."""
        self.say(judged=asdict(finding), spent=False)

    def do(self, work: ChildWork) -> None:
        """Does what is asked.

        Raises:
            Spent: the device can run no more.
        """
        try:
            work.run(self)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, Spent) or self._running is None:
                raise
            self.end(self._failed(error))

    def _failed(self, error: BaseException) -> Judgement:
        assert self._running is not None
        _, case, assumption, _ = self._running
        return Judgement([BringupFailure.of(assumption, case, error)], spent=True)


class Moves(Progress):
    """Reports progress to the parent, which waits for nothing but a sign."""

    def __init__(self, child: Child) -> None:
        super().__init__(quiet=True)
        self.child = child

    def say(self, text: str) -> None:
        """Says that something moves."""
        self.child.say(moves=text)


def main(path: Path) -> None:
    """Does the work in each file that standard input names, until it ends.

    Args:
        path: of a file with the artifact's path, the settings and the number of the device.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # C libraries print to standard output too.
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks that fail interrupt the first one (ranks/launch.py)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    artifact_path, settings, index = pickle.loads(path.read_bytes())
    child = Child(Artifact.open(artifact_path, check=False), settings, index, out)
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while line := asked.get():
        work: ChildWork = torch.load(json.loads(line)["work"], weights_only=False)
        try:
            child.do(work)
        except Spent:
            break
        child.say(done=True)
    child.close()


def _listen(asked: queue.SimpleQueue[str]) -> NoReturn:
    """Hands over what is asked; when the parent is gone, this process and all that it started end, whatever they do."""
    for line in sys.stdin:
        asked.put(line)
    asked.put("")
    time.sleep(END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise SystemExit


if __name__ == "__main__":
    main(Path(sys.argv[1]))
