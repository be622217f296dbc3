"""The training text: chapters from the output of the `bible` command, split into training and held-out ones."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from ...graphs.errors import NpucompileError

COMMAND = ("bible", "-f", "gen1:1-rev22:21")
EVERY = 50
PHASE = 25
"""Chapter i (counted from 0 over the whole text) is held out iff i % EVERY == PHASE: 24 of 1189, about 2 %."""

_LINE = re.compile(r"((?:[1-3])?[A-Za-z]+)(\d+):(\d+) +(\S.*)")


class CorpusError(NpucompileError):
    """Raised when the training text cannot be read or has another form than expected."""


@dataclass(frozen=True)
class Chapter:
    """One chapter: the short name of its book as the command prints it, its number, its verses without labels."""

    book: str
    number: int
    verses: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.book} {self.number}"

    @property
    def text(self) -> str:
        """The verses as one paragraph, joined by single spaces."""
        return " ".join(self.verses)


def read_bible() -> str:
    """Runs the `bible` command of Debian's package bible-kjv and returns what it prints, one labelled verse a line.

    Raises:
        CorpusError: the command is absent or fails.
    """
    try:
        result = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise CorpusError(
            "the command `bible` is not installed; the training text is printed by it and is not part of this package: "
            "`apt-get install bible-kjv` on Debian or Ubuntu brings the command and the text"
        ) from None
    except subprocess.CalledProcessError as error:
        raise CorpusError(f"`{' '.join(COMMAND)}` ended with status {error.returncode}: {error.stderr.strip()[:200]}") from error
    return result.stdout


def parse_chapters(printed: str) -> list[Chapter]:
    """Collects the verses of each chapter without their labels, in the order printed; runs of spaces become one space.

    Raises:
        CorpusError: a line without a label, or a verse out of order.
    """
    chapters: dict[tuple[str, int], list[str]] = {}
    for row, line in enumerate(printed.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CorpusError(f"line {row} of the text is {line[:60]!r}; legal is a label and a verse, as in 'Ge1:1 In the beginning'")
        book, number, verse, text = match.groups()
        verses = chapters.setdefault((book, int(number)), [])
        if int(verse) != len(verses) + 1:
            raise CorpusError(f"line {row} of the text is verse {book}{number}:{verse}, but verse {len(verses) + 1} of that chapter is due")
        verses.append(" ".join(text.split()))
    return [Chapter(book, number, tuple(verses)) for (book, number), verses in chapters.items()]


def split_chapters(chapters: Iterable[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Divides chapters into (training, held out) by their position alone, so that every run agrees."""
    training: list[Chapter] = []
    held_out: list[Chapter] = []
    for index, chapter in enumerate(chapters):
        (held_out if index % EVERY == PHASE else training).append(chapter)
    return training, held_out
