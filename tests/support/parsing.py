"""Texts in pieces, and what parsers of them return."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from npucompile.server.parsers.tool_calls import CallArguments, CallBegin, CallEnd


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """A text cut at up to eight places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class Call(NamedTuple):
    """A whole call; the arguments are a value where they are JSON, else their text."""

    name: str
    arguments: Any


def whole(parts: Iterable[Any]) -> list[Any]:
    """The parts with calls in one piece; a call that has no end is one too."""
    together: list[Any] = []
    texts: list[list[str]] = []
    ended = True
    for part in parts:
        if isinstance(part, CallBegin):
            assert ended
            ended = False
            together.append(Call(part.name, None))
            texts.append([])
        elif isinstance(part, CallArguments):
            assert part.text
            assert not ended
            texts[-1].append(part.text)
        elif isinstance(part, CallEnd):
            assert not ended
            ended = True
        else:
            together.append(part)
    calls = iter(texts)
    return [Call(part.name, _value("".join(next(calls)))) if isinstance(part, Call) else part for part in together]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def joined(parser: Any, pieces: Iterable[str]) -> list[Any]:
    """The parts of a text, with neighbouring pieces of text joined."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert "" not in parts
    together: list[Any] = []
    for part in whole(parts):
        if together and type(part) is type(together[-1]) is not Call:
            together[-1] = together[-1] + part if isinstance(part, str) else type(part)(together[-1].text + part.text)
        else:
            together.append(part)
    return together
