"""Reports the progress of long work: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from tqdm import tqdm

# One process draws all bars, so a lock across processes is not needed; nor is tqdm's monitor thread, which forks would inherit.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

BAR_BYTES = 2**28
"""Less than this is read without a bar."""

BAR_STEPS = 20
MB = 10**6


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

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A bar over `total` steps; its last state stays on the terminal."""
        with tqdm(total=total, desc=title, file=self.stream, disable=self.quiet or not self.stream.isatty(), dynamic_ncols=True) as drawn:
            yield Bar(self, title, total, drawn)

    @contextmanager
    def byte_bar(self, title: str, total: int) -> Iterator[ByteBar]:
        """A bar over bytes, in steps of a twentieth; none where there are less than 256 MiB."""
        with self.bar(title, total // MB) if total >= BAR_BYTES else nullcontext() as bar:
            yield ByteBar(bar, total)


class Bar:
    """One bar; `step` advances it."""

    def __init__(self, progress: Progress, title: str, total: int, drawn: tqdm[None]) -> None:
        self._progress, self._drawn = progress, drawn
        self.title, self.total, self.done = title, total, 0

    def step(self, note: str, count: int = 1) -> None:
        """Advances by `count` and shows `note`."""
        self.done += count
        if self._drawn.disable:
            self._progress.say(f"{self.title} {self.done}/{self.total} {note}")
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
