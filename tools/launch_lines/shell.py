"""Reads a shell script as far as launch lines need it: assignments, exports, arrays, arithmetic, loops that end, blocks.

No command is run. What only a running shell knows ($(...) of anything but `expr` and `seq`, arguments) stays in the words as it is written.
Pages of documentation are read with their slips: flags on a line of their own behind a command whose continuation is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .arithmetic import counted, evaluate, numbers_of
from .shell_words import NAME, Word, substitution_end, tokens

MOST_ROUNDS = 256
"""Rounds of a loop that is followed; the variables of a longer one are not known."""

MOST_COMMANDS = 4096
"""Commands that loops within loops are followed for."""

_ASSIGNMENT = re.compile(rf"({NAME}(?:\[\d+\])?)(\+?)=(.*)", re.DOTALL)
_SIMPLE = re.compile(rf"\$({NAME}|\d)")
_BRACED = re.compile(rf"\$\{{([#!]?)({NAME}|\d+)(?:\[([^\]]*)\])?(?::?[-=](.*))?\}}", re.DOTALL)
_LIST = re.compile(rf"\$\{{(!?)({NAME})\[@\]\}}")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
_CHANGED = re.compile(rf"({NAME})\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)({NAME})")
_KEYWORDS = frozenset(["if", "then", "else", "elif", "fi", "do", "done", "while", "until", "!", "{", "}", "time"])
_OPENING, _CLOSING = frozenset(("then", "do")), frozenset(("fi", "done", "else", "elif"))
_TESTS = {"-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "-eq": "==", "-ne": "!="}


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
        commands: in order; those of a loop that is followed once a round.
        used: names of variables that words refer to.
        settings: variables whose values the script cannot change.
    """

    commands: tuple[ShellCommand, ...]
    used: frozenset[str] = frozenset()
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)


def read(text: str, variables: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None) -> Script:
    """Reads a script.

    Args:
        variables: set before it begins.
        settings: variables that the user sets, which win over whatever the script sets them to.
    """
    reader = _Reader(dict(variables or {}), dict(settings or {}))
    commands: list[list[Word]] = [[]]
    for token in tokens(text.replace("\r\n", "\n")):
        if isinstance(token, Word):
            commands[-1].append(token)
        elif commands[-1]:
            commands.append([])
    reader.run([words for words in commands if words])
    return Script(tuple(reader.commands), frozenset(reader.used), reader.settings)


class _Reader:
    """Carries variables from command to command."""

    def __init__(self, variables: dict[str, str], settings: dict[str, str]) -> None:
        self.settings, self.variables, self.used = settings, variables | settings, set[str]()
        self.commands: list[ShellCommand] = []
        self._blocks: list[tuple[dict[str, str], int]] = []
        self._left = MOST_COMMANDS

    def run(self, commands: list[list[Word]]) -> None:
        """Takes commands in order, and those of a loop once a round where its rounds are known."""
        at = 0
        while at < len(commands):
            words, at, keyword = list(commands[at]), at + 1, ""
            while words and words[0].bare in _KEYWORDS:
                keyword = words.pop(0).bare
                self._keyword(keyword)
            begin, end = _loop(commands, at) if keyword in ("while", "until") or _begins(words, "for") else (0, 0)
            if end:
                body = [commands[begin][1:], *commands[begin + 1 : end]]
                before = dict(self.variables), len(self.commands)
                follow = self._for if _begins(words, "for") else self._while if keyword == "while" else self._until
                if begin == at and follow(words, body):
                    # The loop's `done` closes no block.
                    commands = [*commands[:end], commands[end][1:], *commands[end + 1 :]]
                    at = end
                else:
                    self.variables, self.commands = before[0], self.commands[: before[1]]
                    self._forget(words, body)
            elif words:
                self._command(words)

    def _for(self, words: list[Word], body: list[list[Word]]) -> bool:
        """Follows `for NAME in ...` or `for ((...))`; False where its rounds are not known."""
        header = words[1].bare if len(words) > 1 else ""
        if header.startswith("(("):
            first, condition, step, *_ = [*header[2:-2].split(";"), "", "", ""]
            return bool(condition.strip()) and self._compute(first) and self._rounds(condition, body, True, step)
        values = self._values(words[3:]) if len(words) > 2 and words[2].bare == "in" else None
        if header in self.settings:
            values = [self.settings[header]]
        if values is None or len(values) > MOST_ROUNDS:
            return False
        for value in values:
            self.variables[header] = value
            if not self._round(body):
                return False
        return True

    def _until(self, words: list[Word], body: list[list[Word]]) -> bool:
        return self._while(words, body, wanted=False)

    def _while(self, words: list[Word], body: list[list[Word]], wanted: bool = True) -> bool:
        """Follows `while` with a comparison of numbers; False where its rounds are not known."""
        if len(words) == 1 and words[0].bare.startswith("(("):
            return self._rounds(words[0].bare[2:-2], body, wanted)
        if len(words) == 5 and words[0].bare in ("[", "[[") and words[2].bare in _TESTS:
            left, right = words[1].bare, words[3].bare
            return self._rounds(f"({left}) {_TESTS[words[2].bare]} ({right})", body, wanted)
        return False

    def _rounds(self, condition: str, body: list[list[Word]], wanted: bool, step: str = "") -> bool:
        for _ in range(MOST_ROUNDS):
            value = self._number(condition)
            if value is None or bool(value) != wanted:
                return value is not None
            if not self._round(body) or (step.strip() and not self._compute(step)):
                return False
        return False

    def _round(self, body: list[list[Word]]) -> bool:
        self._left -= len(body)
        if self._left >= 0:
            self.run([words for words in body if words])
        return self._left >= 0

    def _values(self, words: list[Word]) -> list[str] | None:
        """The values of a loop's list; None where they are not known."""
        values: list[str] = []
        for word in words:
            if match := _RANGE.fullmatch(word.bare):
                first, last = int(match[1]), int(match[2])
                size = abs(int(match[3] or 1)) or 1
                numbers = counted(first, last, size if first <= last else -size)
                if numbers is None:
                    return None
                values += numbers
            else:
                values += self._expand(word)
        return None if any(set(value) & set("$`*?") for value in values) else values

    def _forget(self, words: list[Word], body: list[list[Word]]) -> None:
        """Variables that a loop changes whose rounds are not known have no value; those that do not depend on the round keep theirs."""
        changed = {words[1].bare} if _begins(words, "for") and len(words) > 1 else set()
        for command in [words, *body]:
            for word in command:
                match = _ASSIGNMENT.fullmatch(word.bare) if _is_assignment(word) else None
                if match and re.search(rf"\b{re.escape(match[1])}\b", match[3]):
                    changed.add(match[1])
                elif word.bare.startswith("((") or _begins(command, "let"):
                    changed |= _changed(word.bare)
        for name in changed - set(self.settings):
            self.variables.pop(name, None)

    def _command(self, words: list[Word]) -> None:
        """Takes one command: assignments first."""
        first = words[0].bare
        if first in ("for", "case", "function", "esac"):
            return
        if first in ("export", "declare", "typeset", "local", "readonly", "set"):
            self._assign([word for word in words[1:] if _ASSIGNMENT.fullmatch(word.bare)], self.variables)
            return
        if first == "let" or first.startswith("(("):
            for word in words[1:] if first == "let" else words:
                self._compute(word.bare.removeprefix("((").removesuffix("))"))
            return
        own: list[Word] = []
        while words and _is_assignment(words[0]):
            own.append(words.pop(0))
        if not words:
            self._assign(own, self.variables)
            return
        scope = dict(self.variables)
        self._assign(own, scope)
        line, expanded = words[0].line, tuple(text for word in words for text in self._expand(word))
        if expanded[:1] == ("unset",):
            for name in set(expanded[1:]) - set(self.settings):
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

    def _assign(self, words: list[Word], scope: dict[str, str]) -> None:
        for word in words:
            name, plus, _ = _ASSIGNMENT.fullmatch(word.bare).groups()  # type: ignore[union-attr]
            if name in self.settings:
                continue
            if word.array is not None:
                kept = _elements(name, scope) if plus else []
                for key in [key for key in scope if key.startswith(f"{name}[") and not plus]:
                    del scope[key]
                values = [text for each in word.array for text in self._expand(each)]
                scope |= {f"{name}[{i}]": value for i, value in enumerate([*kept, *values])} | self.settings
                continue
            rest = Word(word.line, _without(word.parts, len(name) + len(plus) + 1))
            value = " ".join(self._expand(rest, split=False))
            scope[name] = scope.get(name, "") + value if plus else value

    def _number(self, text: str) -> int | None:
        """The value of an expression; what it sets is set."""
        text = self._substitute(text)
        self.used |= set(re.findall(rf"(?<!\w){NAME}", text))
        value = evaluate(text, self.variables)
        self.variables |= self.settings
        return value

    def _compute(self, text: str) -> bool:
        """Runs an expression; what it would set has no value where it cannot be computed."""
        if not text.strip() or self._number(text) is not None:
            return True
        for name in _changed(text) - set(self.settings):
            self.variables.pop(name, None)
        return False

    def _expand(self, word: Word, split: bool = True) -> list[str]:
        """The words that a word becomes: a variable without quotes may become none or several, and an array always."""
        texts, quoted = [""], False
        for text, quote in word.parts:
            if quote == "'":
                texts[-1] += text
                quoted = True
                continue
            elements = self._list(text)
            if elements is not None and split:
                pieces: list[str] | None = elements if quote else [piece for each in elements for piece in each.split()]
            else:
                value, pieces = self._substitute(text), None
                if not quote and split and value != text and not re.search(r"\$[({]|\byour\b", value):
                    pieces = value.split()
                elif pieces is None:
                    texts[-1] += value
                    quoted = quoted or bool(quote)
            if pieces:
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return texts if quoted or texts != [""] else []

    def _list(self, text: str) -> list[str] | None:
        """The elements, or indexes, of an array that is named as a list; None where it is no such name, or no array that is known."""
        match = _LIST.fullmatch(text)
        if not match:
            return None
        self.used.add(match[2])
        values = _elements(match[2], self.variables)
        return ([str(i) for i in range(len(values))] if match[1] else values) or None

    def _substitute(self, text: str) -> str:
        out, at = "", 0
        while match := re.search(r"[$`]", text[at:]):
            begin = at + match.start()
            end = substitution_end(text, begin)
            value = self._value(text[begin:end])
            out += text[at:begin] + (text[begin:end] if value is None else value)
            at = end
        return out + text[at:]

    def _value(self, text: str) -> str | None:
        """What a substitution becomes; None where only a running shell knows."""
        if text.startswith("$((") and text.endswith("))"):
            value = self._number(text[3:-2])
            return None if value is None else str(value)
        if text[0] == "`" or text.startswith("$("):
            words = list(tokens(text[1:-1] if text[0] == "`" else text[2:-1]))
            expanded = [each for word in words if isinstance(word, Word) for each in self._expand(word)]
            numbers = numbers_of(expanded) if all(isinstance(word, Word) for word in words) else None
            return None if numbers is None else " ".join(numbers)
        if match := _SIMPLE.fullmatch(text):
            return self._variable(match[1])
        if match := _BRACED.fullmatch(text):
            return self._braced(match[1], match[2], match[3], match[4])
        return None

    def _variable(self, name: str) -> str | None:
        self.used.add(name)
        return self.variables.get(name, self.variables.get(f"{name}[0]"))

    def _braced(self, mark: str, name: str, index: str | None, default: str | None) -> str | None:
        """`${NAME}`, `${NAME[1]}`, `${NAME[@]}`, `${#NAME[@]}`, each with a default behind `:-`."""
        if index in ("@", "*"):
            self.used.add(name)
            values = _elements(name, self.variables)
            return None if not values or mark == "!" else str(len(values)) if mark else " ".join(values)
        if mark:
            value = self._variable(name) if mark == "#" and index is None else None
            return None if value is None else str(len(value))
        if index is None:
            value = self._variable(name)
        else:
            self.used.add(name)
            beyond = "" if _elements(name, self.variables) else None
            number = self._number(index)
            value = None if number is None else self.variables.get(f"{name}[{number}]", beyond)
        return value if value is not None or default is None else self._substitute(default)


def _loop(commands: list[list[Word]], at: int) -> tuple[int, int]:
    """Indexes of the commands with the `do` and the `done` of a loop whose header ends before `at`; zeros where there are none."""
    begin = depth = 0
    for i in range(at, len(commands)):
        for word in commands[i]:
            if word.bare not in _KEYWORDS:
                break
            begin = begin or (i if word.bare == "do" else 0)
            depth += (word.bare == "do") - (word.bare == "done")
        if begin and depth == 0:
            return begin, i
    return 0, 0


def _begins(words: list[Word], name: str) -> bool:
    return bool(words) and words[0].bare == name


def _is_assignment(word: Word) -> bool:
    """Whether a word is `NAME=...` with an unquoted name."""
    return bool(word.parts and not word.parts[0][1] and _ASSIGNMENT.match(word.parts[0][0]))


def _changed(text: str) -> set[str]:
    """Names that an expression sets."""
    return {one or other for one, other in _CHANGED.findall(text)}


def _elements(name: str, scope: Mapping[str, str]) -> list[str]:
    values: list[str] = []
    while f"{name}[{len(values)}]" in scope:
        values.append(scope[f"{name}[{len(values)}]"])
    return values


def _without(parts: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Parts without their first characters."""
    rest = []
    for text, quote in parts:
        cut = min(count, len(text))
        count -= cut
        rest.append((text[cut:], quote))
    return rest
