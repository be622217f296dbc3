"""Texts in pieces, and what parsers of them return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """A text cut at up to eight places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def joined(parser: Any, pieces: Iterable[str]) -> list[Any]:
    """The parts of a text, with neighbouring pieces of text joined."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert "" not in parts
    together: list[Any] = []
    for part in parts:
        if isinstance(part, str) and together and isinstance(together[-1], str):
            together[-1] += part
        else:
            together.append(part)
    return together
