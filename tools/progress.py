"""Turns steps of long work into lines and bars on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

WIDTH = 28


class Progress:
    """Says what is going on. On a terminal the current bar is redrawn in place; elsewhere each step is a line.

    Args:
        stream: where to write; standard error leaves standard output to results.
        quiet: write nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.live = not quiet and self.stream.isatty()

    def say(self, text: str) -> None:
        """One line."""
        if not self.quiet:
            self.stream.write(("\r\x1b[K" if self.live else "") + text + "\n")
            self.stream.flush()

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A bar over `total` steps; its last state stays on the terminal."""
        bar = Bar(self, title, total)
        bar.draw()
        try:
            yield bar
        finally:
            if self.live:
                self.stream.write("\n")
                self.stream.flush()


class Bar:
    """One bar; `step` advances it."""

    def __init__(self, owner: Progress, title: str, total: int) -> None:
        self.owner, self.title, self.total, self.done = owner, title, total, 0
        self.began = time.monotonic()

    def step(self, note: str, count: int = 1) -> None:
        """Advances by `count` and shows `note`."""
        self.done += count
        if self.owner.live:
            self.draw(note)
        else:
            self.owner.say(f"{self.title} {self.done}/{self.total} {note}")

    def draw(self, note: str = "") -> None:
        """Redraws on a terminal, with the time left at the pace so far."""
        if not self.owner.live:
            return
        filled = WIDTH * self.done // max(1, self.total)
        spent = time.monotonic() - self.began
        left = f" {spent / self.done * (self.total - self.done):.0f} s left" if 0 < self.done < self.total else f" {spent:.1f} s"
        line = f"\r\x1b[K{self.title} [{'#' * filled}{'.' * (WIDTH - filled)}] {self.done}/{self.total}{left}  {note}"
        self.owner.stream.write(line[:160])
        self.owner.stream.flush()
