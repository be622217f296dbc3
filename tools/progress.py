"""Reports the progress of long work: bars on a terminal, lines elsewhere, where silence is broken from time to time."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from tqdm import tqdm

# One process draws all bars, so a lock across processes is not needed; nor is tqdm's monitor thread, which forks would inherit.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

BAR_BYTES = 2**28
"""Less than this is read without a bar."""

SILENT_S = 30.0
"""Where no bar is drawn, a line says after so long how far it is."""

BAR_STEPS = 20
MB = 10**6


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hides warnings and log lines of torch and torchair, which are about their own code."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Progress:
    """Reports progress; on a terminal a bar is redrawn in place, elsewhere each step is a line.

    Args:
        stream: where to write; None is standard error, which leaves standard output to results.
        quiet: write nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(text, file=self.stream)
            self.stream.flush()

    def begins(self, what: str) -> None:
        """Called before a step of a bar that was named ahead."""

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A bar over `total` steps; its last state stays on the terminal."""
        with tqdm(total=total, desc=title, file=self.stream, disable=self.quiet or not self.stream.isatty(), dynamic_ncols=True) as drawn:
            bar = Bar(self, title, total, drawn)
            if self.quiet or not drawn.disable:
                yield bar
                return
            ended = threading.Event()
            speaking = threading.Thread(target=bar.break_silence, args=(ended,), daemon=True)
            speaking.start()
            try:
                yield bar
            finally:
                ended.set()
                speaking.join()

    @contextmanager
    def byte_bar(self, title: str, total: int) -> Iterator[ByteBar]:
        """A bar over bytes, in steps of a twentieth; none where there are less than 256 MiB."""
        with self.bar(title, total // MB) if total >= BAR_BYTES else nullcontext() as bar:
            yield ByteBar(bar, total)


class Bar:
    """One bar; `step` advances it."""

    def __init__(self, progress: Progress, title: str, total: int, drawn: tqdm[None]) -> None:
        self._progress, self._drawn = progress, drawn
        self.title, self.total, self.done, self._now = title, total, 0, "..."
        self._began_s = self._said_s = time.monotonic()

    def break_silence(self, ended: threading.Event) -> None:
        """Says how far it is whenever nothing was said for SILENT_S, until it has ended."""
        while not ended.wait(max(0.0, self._said_s + SILENT_S - time.monotonic())):
            if time.monotonic() >= self._said_s + SILENT_S:
                self._say(self._now)

    def _say(self, note: str) -> None:
        """Writes a line: the count, a note, and if it takes long how long it has and how long it may yet."""
        self._said_s = time.monotonic()
        took_s, left = self._said_s - self._began_s, ""
        if took_s >= SILENT_S and self.done < self.total:
            left = f", {took_s:.0f} s so far" + (f", about {took_s / self.done * (self.total - self.done):.0f} s left" if self.done else "")
        self._progress.say(f"{self.title} {self.done}/{self.total} {note}{left}")

    def begin(self, what: str) -> None:
        """Names the step that begins: it is shown while it lasts, so that one that never ends is known."""
        self._now = f"{what} ..."
        self._drawn.set_postfix_str(self._now)
        self._progress.begins(what)

    def step(self, note: str, count: int = 1) -> None:
        """Advances by `count` and shows `note`."""
        self.done, self._now = self.done + count, "..."
        if self._drawn.disable:
            self._say(note)
        else:
            self._drawn.set_postfix_str(note, refresh=False)
            self._drawn.update(count)


class ByteBar:
    """A bar that counts bytes; nothing is shown where it has none."""

    def __init__(self, bar: Bar | None, total: int) -> None:
        self._bar, self._total, self._done, self._shown = bar, total, 0, 0

    def add(self, nbytes: int) -> None:
        """Advances by a number of bytes."""
        self._done += nbytes
        if self._bar and self._done * BAR_STEPS // self._total > self._shown * BAR_STEPS // self._total:
            self._bar.step("MB", self._done // MB - self._shown // MB)
            self._shown = self._done
