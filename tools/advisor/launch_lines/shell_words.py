"""Cuts a shell script into words and operators, as far as launch lines need it: quotes, continuations, comments, arrays.

Pages of documentation are read with their slips: a blank or a comment behind a continuation, and placeholders as in `<ip>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_COMMAND = r"\$\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*+\))*+\))*+\)|`[^`]*(?:`|\Z)"
SUBSTITUTION = re.compile(rf"{_COMMAND}|\$\{{(?:[^{{}}]|\{{[^{{}}]*\}})*+\}}|\$(?:{NAME}|[0-9@*#?$!-])?")
"""A variable, a sum, or the output of a command; brackets three deep."""

_DOUBLE = rf'"(?:\\.|{_COMMAND}|[^"\\])*+(?:"|\Z)'
_ESCAPED = re.compile(rf'({_COMMAND})|\\(["\\$`\n])', re.DOTALL)
_PIECE = re.compile(
    rf"""
    (?P<gap>\\[ \t]*(?:\#[^\n]*)?(?:\n|\Z)|[ \t]+)
    |(?P<comment>(?<![^\s;&|()])\#[^\n]*)
    |(?P<placeholder><[^<>\s&|;=(][^<>\n|;]*>)
    |(?P<document><<-?[ \t]*['"]?(?P<mark>\w+)['"]?)
    |(?P<redirection>(?:(?<!\S)\d+)?[<>]&\d|(?:(?:(?<!\S)\d+)?(?:>>|>&|>|<<<|<&|<)|&>>?)[ \t]*(?:"[^"]*"|'[^']*'|[^\s;|&()<>])*)
    |(?P<array>(?<![^\s;&|()]){NAME}\+?=\((?:'[^']*'|{_DOUBLE}|{_COMMAND}|[^()])*+(?:\)|\Z))
    |(?P<sum>(?<![^\s;&|()])\(\((?:[^()]|\([^()]*\))*+\)\))
    |(?P<operator>&&|\|\||;;|[;|&()\n])
    |(?P<single>'[^']*(?:'|\Z))
    |(?P<double>{_DOUBLE})
    |(?P<escaped>\\.)
    |(?P<plain>{SUBSTITUTION.pattern}|.)
    """,
    re.VERBOSE | re.DOTALL,
)


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
    while match := _PIECE.match(text, at):
        kind, found, at = match.lastgroup, match[0], match.end()
        if kind in ("placeholder", "array", "sum", "single", "double", "escaped", "plain"):
            word = word or Word(text.count("\n", 0, match.start()) + 1)
            if kind == "array":
                name, _, inside = found.partition("(")
                word.array = [token for token in tokens(inside.removesuffix(")")) if isinstance(token, Word)]
                word.add(name, "")
            else:
                word.add(*_part(kind, found))
            continue
        if word is not None:
            yield word
            word = None
        if kind == "operator":
            yield found
        elif kind == "document":
            closing = re.compile(rf"^[ \t]*{match['mark']}[ \t]*$", re.MULTILINE).search(text, at)
            yield from tokens(text[at:].partition("\n")[0])
            yield "\n"
            at = closing.end() if closing else len(text)
    if word is not None:
        yield word


def _part(kind: str, found: str) -> tuple[str, str]:
    """The text of a part and its quote."""
    match kind:
        case "single":
            return found[1:].removesuffix("'"), "'"
        case "double":
            inside = found[1:-1] if len(found) > 1 and found.endswith('"') else found[1:]
            # What is substituted has quotes of its own.
            return _ESCAPED.sub(lambda escaped: escaped[1] or escaped[2].strip("\n"), inside), '"'
        case "escaped":
            return found[1:], "'"
    return found, "'" if kind == "sum" else ""
