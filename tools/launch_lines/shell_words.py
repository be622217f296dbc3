"""Cuts a shell script into words and operators, as far as launch lines need it: quotes, continuations, comments, arrays.

Pages of documentation are read with their slips: a blank or a comment behind a continuation, and placeholders as in `<ip>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PIECE = re.compile(
    r"""
    (?P<gap>\\[ \t]*(?:\#[^\n]*)?(?:\n|\Z)|[ \t]+)
    |(?P<comment>\#[^\n]*)
    |(?P<placeholder><[^<>\s&|;=(][^<>\n|;]*>)
    |(?P<document><<-?[ \t]*['"]?(?P<mark>\w+)['"]?)
    |(?P<redirection>(?:(?<!\S)\d+)?[<>]&\d|(?:(?:(?<!\S)\d+)?(?:>>|>&|>|<<<|<&|<)|&>>?)[ \t]*(?:"[^"]*"|'[^']*'|[^\s;|&()<>])*)
    |(?P<operator>&&|\|\||;;|[;|&()\n])
    """,
    re.VERBOSE,
)
_ARRAY = re.compile(rf"{NAME}\+?=")
_VARIABLE = re.compile(rf"\$(?:{NAME}|[0-9@*#?$!-])?")
_CLOSING = {"(": ")", "{": "}"}


@dataclass
class Word:
    """A word.

    Attributes:
        line: that it begins in, from 1.
        parts: (text, quote), where quote is "", "'" or '"'.
        array: the words in the parentheses behind `NAME=`; None where there are none.
    """

    line: int
    parts: list[tuple[str, str]] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def bare(self) -> str:
        """The text as written without quotes."""
        return "".join(text for text, _ in self.parts)

    def add(self, text: str, quote: str) -> None:
        """Adds a part; unquoted neighbours become one."""
        if self.parts and not quote and not self.parts[-1][1]:
            text = self.parts.pop()[0] + text
        self.parts.append((text, quote))


def tokens(text: str) -> Iterator[Word | str]:
    """Words and operators; redirections, here-documents and comments are left out."""
    at, word = 0, None
    while at < len(text):
        match = _PIECE.match(text, at)
        kind = match.lastgroup if match else None
        if text[at] == "(" and word is not None and _ARRAY.fullmatch(word.bare) and not word.parts[-1][1]:
            end = _closed(text, at)
            word.array = [token for token in tokens(text[at + 1 : end].removesuffix(")")) if isinstance(token, Word)]
        elif text.startswith("((", at) and word is None and text.endswith("))", at, _closed(text, at)):
            end = _closed(text, at)
            word = Word(text.count("\n", 0, at) + 1, [(text[at:end], "'")])
        elif match is None or kind == "placeholder" or (kind == "comment" and word is not None):
            body, quote, end = (match[0], "", match.end()) if match and kind == "placeholder" else _part(text, at)
            word = word or Word(text.count("\n", 0, at) + 1)
            word.add(body, quote)
        else:
            end = match.end()
            if word is not None:
                yield word
                word = None
            if kind == "operator":
                yield match[0]
            elif kind == "document":
                closing = re.compile(rf"^[ \t]*{match['mark']}[ \t]*$", re.MULTILINE).search(text, end)
                yield from tokens(text[end:].partition("\n")[0])
                yield "\n"
                end = closing.end() if closing else len(text)
        at = end
    if word is not None:
        yield word


def _part(text: str, at: int) -> tuple[str, str, int]:
    """A part of a word: its text, its quote, and where it ends."""
    match text[at]:
        case '"':
            return _quoted(text, at)
        case "'":
            body, _, _ = text[at + 1 :].partition("'")
            return body, "'", at + len(body) + 2
        case "\\":
            return text[at + 1 : at + 2], "'", at + 2
        case "$" | "`":
            end = substitution_end(text, at)
            return text[at:end], "", end
        case char:
            return char, "", at + 1


def _quoted(text: str, at: int) -> tuple[str, str, int]:
    """The part in the double quotes that begin at `at`; one that is never closed ends with the text."""
    out, at = "", at + 1
    while at < len(text) and text[at] != '"':
        end = at + 1
        if text[at] == "`" or text.startswith("$(", at):
            # What is substituted has quotes of its own.
            end = substitution_end(text, at)
            out += text[at:end]
        elif text[at] == "\\" and text[end : end + 1] in ('"', "\\", "$", "`", "\n"):
            out, end = out + text[end].strip("\n"), end + 1
        else:
            out += text[at]
        at = end
    return out, '"', at + 1


def substitution_end(text: str, at: int) -> int:
    """Where a `$...` or a pair of backquotes ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    if text[at + 1 : at + 2] in _CLOSING:
        return _closed(text, at + 1)
    match = _VARIABLE.match(text, at)
    return match.end() if match else at + 1


def _closed(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`; the end of the text where none does."""
    depth, opening = 0, text[at]
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == _CLOSING[opening])
        if depth == 0:
            return i + 1
    return len(text)
