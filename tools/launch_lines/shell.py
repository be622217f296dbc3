"""Reads a shell script as far as launch lines need it: assignments, exports, quotes, continuations, comments, blocks.

No command is run. What only a running shell knows ($(...), loop variables, arguments) stays in the words as it is written.
Pages of documentation are read with their slips: a blank or a comment behind a continuation, placeholders as in `<ip>` and `your ip`, and
flags on a line of their own behind a command whose continuation is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME}(?:\[\d+\])?)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(rf"\$(?:\{{({_NAME})(?::?-([^}}]*))?\}}|({_NAME})|\{{({_NAME})\[(\d+)\]\}})")
_PLACEHOLDER = re.compile(r"<[^<>\s&|;=(][^<>\n|;]*>")
_CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?(\n|$)")
_REDIRECTION = re.compile(r"\d*(?:>>|>&|&>>|&>|>|<<<|<&|<)(?:&\d)?")
_HEREDOC = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?")
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_KEYWORDS = frozenset(["if", "then", "else", "elif", "fi", "do", "done", "while", "until", "!", "{", "}", "time"])
_OPENING, _CLOSING = frozenset(("then", "do")), frozenset(("fi", "done", "else", "elif"))


@dataclass(frozen=True)
class ShellCommand:
    """A simple command.

    Attributes:
        words: after expansion, quotes removed.
        line: number of its first line, from 1.
        variables: of the environment that it runs in, as far as the script sets them.
    """

    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Script:
    """A script that was read.

    Attributes:
        commands: in order.
        used: names of variables that words refer to.
    """

    commands: tuple[ShellCommand, ...]
    used: frozenset[str] = frozenset()


@dataclass
class _Word:
    """Parts of a word: (text, quote), where quote is "", "'" or '"'."""

    line: int
    parts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bare(self) -> str:
        """The text as written without quotes."""
        return "".join(text for text, _ in self.parts)


def read(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """Reads a script.

    Args:
        variables: set before it begins.
    """
    reader = _Reader(dict(variables or {}))
    pending: list[_Word] = []
    for token in _tokens(text.replace("\r\n", "\n")):
        if isinstance(token, _Word):
            pending.append(token)
        elif pending:
            reader.command(pending)
            pending = []
    if pending:
        reader.command(pending)
    return Script(tuple(reader.commands), frozenset(reader.used))


class _Reader:
    """Carries variables from command to command."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables, self.used = variables, set[str]()
        self.commands: list[ShellCommand] = []
        self._blocks: list[tuple[dict[str, str], int]] = []

    def command(self, words: list[_Word]) -> None:
        """Takes one command: keywords and assignments first."""
        while words and words[0].bare in _KEYWORDS:
            self._keyword(words.pop(0).bare)
        if not words or words[0].bare in ("for", "case", "function", "esac"):
            return
        if words[0].bare in ("export", "declare", "typeset", "local", "readonly", "set"):
            words = [word for word in words[1:] if _ASSIGNMENT.fullmatch(word.bare)]
            self._assign(words, self.variables)
            return
        own: list[_Word] = []
        while words and _is_assignment(words[0]):
            own.append(words.pop(0))
        if not words:
            self._assign(own, self.variables)
            return
        scope = dict(self.variables)
        self._assign(own, scope)
        line, expanded = words[0].line, tuple(text for word in words for text in self._expand(word))
        if expanded[:1] == ("unset",):
            for name in expanded[1:]:
                self.variables.pop(name, None)
        elif expanded and expanded[0].startswith("--") and self.commands:
            before = self.commands[-1]
            self.commands[-1] = ShellCommand(before.words + expanded, before.line, before.variables)
        elif expanded:
            self.commands.append(ShellCommand(expanded, line, scope))

    def _keyword(self, word: str) -> None:
        """Variables of a block that launches something are those of that block alone: one branch of a script runs on each machine."""
        if word in _CLOSING and self._blocks:
            before, commands = self._blocks.pop()
            if len(self.commands) > commands:
                self.variables = before
        if word in _OPENING or word == "else":
            self._blocks.append((dict(self.variables), len(self.commands)))

    def _assign(self, words: list[_Word], scope: dict[str, str]) -> None:
        for word in words:
            name, plus, _ = _ASSIGNMENT.fullmatch(word.bare).groups()  # type: ignore[union-attr]
            rest = _Word(word.line, _without(word.parts, len(name) + len(plus) + 1))
            value = " ".join(self._expand(rest, split=False))
            scope[name] = scope.get(name, "") + value if plus else value

    def _expand(self, word: _Word, split: bool = True) -> list[str]:
        """The words that a word becomes: a variable without quotes may become none or several."""
        texts, quoted = [""], False
        for text, quote in word.parts:
            if quote == "'":
                texts[-1] += text
                quoted = True
                continue
            value, pieces = self._substitute(text), None
            if not quote and split and value != text and not re.search(r"\$[({]|\byour\b", value):
                pieces = value.split()
            if pieces is None:
                texts[-1] += value
                quoted = quoted or bool(quote)
            elif pieces:
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return texts if quoted or texts != [""] else []

    def _substitute(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3] or match[4]
            self.used.add(name)
            key = f"{name}[{match[5]}]" if match[5] else name
            return self.variables.get(key, match[2] if match[2] is not None else match[0])

        return _VARIABLE.sub(value, text)


def _is_assignment(word: _Word) -> bool:
    """Whether a word is `NAME=...` with an unquoted name."""
    return bool(word.parts and not word.parts[0][1] and _ASSIGNMENT.match(word.parts[0][0]))


def _without(parts: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Parts without their first characters."""
    rest = []
    for text, quote in parts:
        cut = min(count, len(text))
        count -= cut
        rest.append((text[cut:], quote))
    return rest


def _tokens(text: str) -> Iterator[_Word | str]:
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
            word = word or _Word(line)
            word.parts.append((body, char))
            line += text.count("\n", at, end)
            at = end
        elif char == "\\":
            word = word or _Word(line)
            word.parts.append((text[at + 1 : at + 2], "'"))
            at += 2
        elif char == "$" or char == "`":
            end = _substitution(text, at)
            word = word or _Word(line)
            _append(word, text[at:end])
            line += text.count("\n", at, end)
            at = end
        elif match := _PLACEHOLDER.match(rest):
            word = word or _Word(line)
            _append(word, match[0])
            at += match.end()
        elif (match := _HEREDOC.match(rest)) and not rest.startswith("<<<"):
            closing = re.compile(rf"^[ \t]*{match[1]}[ \t]*$", re.MULTILINE).search(text, at + match.end())
            stop = text.find("\n", at)
            tail, at = text[at + match.end() : stop if stop >= 0 else len(text)], closing.end() if closing else len(text)
            if word:
                yield word
                word = None
            yield from _tokens(tail)
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
        elif char == "(" and word is not None and word.bare.endswith("=") and not word.parts[-1][1]:
            values, end = _array(text, at, word)
            yield from values
            line += text.count("\n", at, end)
            at, word = end, None
        elif operator := next((mark for mark in _OPERATORS if rest.startswith(mark)), None):
            if word:
                yield word
                word = None
            yield operator
            line += operator == "\n"
            at += len(operator)
        else:
            word = word or _Word(line)
            _append(word, char)
            at += 1
    if word:
        yield word


def _append(word: _Word, text: str) -> None:
    if word.parts and not word.parts[-1][1]:
        word.parts[-1] = (word.parts[-1][0] + text, "")
    else:
        word.parts.append((text, ""))


def _quoted(text: str, at: int) -> tuple[str, int]:
    """The inside of the quotes that begin at `at`, and where they have ended; a quote that is never closed ends with the text."""
    quote, out, i = text[at], "", at + 1
    while i < len(text) and text[i] != quote:
        if quote == '"' and text[i] == "\\" and text[i + 1 : i + 2] in ('"', "\\", "$", "`", "\n"):
            out += "" if text[i + 1] == "\n" else text[i + 1]
            i += 2
            continue
        out += text[i]
        i += 1
    return out, i + 1


def _substitution(text: str, at: int) -> int:
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
    match = re.compile(rf"\$(?:{_NAME}|[0-9@*#?$!-])?").match(text, at)
    return match.end() if match else at + 1


def _skip_word(text: str, at: int) -> int:
    match = re.compile(r"[ \t]*(?:\"[^\"]*\"|'[^']*'|[^\s;|&()<>])*").match(text, at)
    return match.end() if match else at


def _array(text: str, at: int, word: _Word) -> tuple[list[_Word], int]:
    """Assignments `NAME[0]=...` for an array whose values are in the parentheses at `at`, and where those end."""
    end = text.find(")", at)
    end = len(text) if end < 0 else end
    values = [token for token in _tokens(text[at + 1 : end]) if isinstance(token, _Word)]
    name = word.bare[:-1]
    return [_Word(word.line, [(f"{name}[{i}]=", ""), *value.parts]) for i, value in enumerate(values)], end + 1
