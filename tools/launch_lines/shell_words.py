"""Cuts a shell script into words and operators, as far as launch lines need it: quotes, continuations, comments, arrays.

Pages of documentation are read with their slips: a blank or a comment behind a continuation, and placeholders as in `<ip>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLACEHOLDER = re.compile(r"<[^<>\s&|;=(][^<>\n|;]*>")
_CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?(\n|$)")
_REDIRECTION = re.compile(r"\d*(?:>>|>&|&>>|&>|>|<<<|<&|<)(?:&\d)?")
_HEREDOC = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?")
_ARRAY = re.compile(rf"{NAME}\+?=")
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")


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


def tokens(text: str) -> Iterator[Word | str]:
    """Words and operators; redirections, here-documents and comments are left out."""
    at, line, word = 0, 1, None
    while at < len(text):
        rest = text[at:]
        char = text[at]
        if match := _CONTINUED.match(rest):
            if word:
                yield word
                word = None
            line += match[0].count("\n")
            at += match.end()
        elif char in " \t":
            if word:
                yield word
                word = None
            at += 1
        elif char == "#" and word is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char in "'\"":
            body, end = _quoted(text, at)
            word = word or Word(line)
            word.parts.append((body, char))
            line += text.count("\n", at, end)
            at = end
        elif char == "\\":
            word = word or Word(line)
            word.parts.append((text[at + 1 : at + 2], "'"))
            at += 2
        elif char == "$" or char == "`":
            end = substitution_end(text, at)
            word = word or Word(line)
            _append(word, text[at:end])
            line += text.count("\n", at, end)
            at = end
        elif match := _PLACEHOLDER.match(rest):
            word = word or Word(line)
            _append(word, match[0])
            at += match.end()
        elif (match := _HEREDOC.match(rest)) and not rest.startswith("<<<"):
            closing = re.compile(rf"^[ \t]*{match[1]}[ \t]*$", re.MULTILINE).search(text, at + match.end())
            stop = text.find("\n", at)
            tail, at = text[at + match.end() : stop if stop >= 0 else len(text)], closing.end() if closing else len(text)
            if word:
                yield word
                word = None
            yield from tokens(tail)
            yield "\n"
            line = text.count("\n", 0, at) + 1
        elif char in "<>" or (char == "&" and rest[1:2] == ">"):
            if word:
                if not word.bare.isdigit():
                    yield word
                word = None
            match = _REDIRECTION.match(rest)
            at += match.end() if match else 1
            at = _skip_word(text, at) if match and not match[0].endswith(("&1", "&2")) else at
        elif char == "(" and word is not None and _ARRAY.fullmatch(word.bare) and not word.parts[-1][1]:
            end = substitution_end(f"${text[at:]}", 0) - 1 + at
            word.array = [token for token in tokens(text[at + 1 : end].removesuffix(")")) if isinstance(token, Word)]
            yield word
            line += text.count("\n", at, end)
            at, word = end, None
        elif word is None and (end := _arithmetic_end(text, at)):
            yield Word(line, [(text[at:end], "'")])
            line += text.count("\n", at, end)
            at = end
        elif operator := next((mark for mark in _OPERATORS if rest.startswith(mark)), None):
            if word:
                yield word
                word = None
            yield operator
            line += operator == "\n"
            at += len(operator)
        else:
            word = word or Word(line)
            _append(word, char)
            at += 1
    if word:
        yield word


def _append(word: Word, text: str) -> None:
    if word.parts and not word.parts[-1][1]:
        word.parts[-1] = (word.parts[-1][0] + text, "")
    else:
        word.parts.append((text, ""))


def _quoted(text: str, at: int) -> tuple[str, int]:
    """The inside of the quotes that begin at `at`, and where they have ended; a quote that is never closed ends with the text."""
    quote, out, i = text[at], "", at + 1
    while i < len(text) and text[i] != quote:
        if quote == '"' and (text[i] == "`" or text.startswith("$(", i)):
            # What is substituted has quotes of its own.
            end = substitution_end(text, i)
            out, i = out + text[i:end], end
            continue
        if quote == '"' and text[i] == "\\" and text[i + 1 : i + 2] in ('"', "\\", "$", "`", "\n"):
            out += "" if text[i + 1] == "\n" else text[i + 1]
            i += 2
            continue
        out += text[i]
        i += 1
    return out, i + 1


def substitution_end(text: str, at: int) -> int:
    """Where a `$...` or a pair of backquotes ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    opening = text[at + 1 : at + 2]
    if opening in ("(", "{"):
        depth, closing = 0, {"(": ")", "{": "}"}[opening]
        for i in range(at + 1, len(text)):
            depth += (text[i] == opening) - (text[i] == closing)
            if depth == 0:
                return i + 1
        return len(text)
    match = re.compile(rf"\$(?:{NAME}|[0-9@*#?$!-])?").match(text, at)
    return match.end() if match else at + 1


def _skip_word(text: str, at: int) -> int:
    match = re.compile(r"[ \t]*(?:\"[^\"]*\"|'[^']*'|[^\s;|&()<>])*").match(text, at)
    return match.end() if match else at


def _arithmetic_end(text: str, at: int) -> int:
    """Where the `((...))` that begins at `at` ends; 0 where none does."""
    if not text.startswith("((", at):
        return 0
    end = substitution_end(f"${text[at:]}", 0) - 1 + at
    return end if text.endswith("))", at, end) else 0
