"""Reads a shell script as far as launch lines need it: assignments, exports, arrays, sums, loops over a list, blocks.

No command is run. What only a running shell knows (arguments, the output of commands, loops until something is so) stays in the words as it
is written, and who reads a flag's value says that `--set` gives it. Pages of documentation are read with their slips: flags on a line of
their own behind a command whose continuation is missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .shell_words import NAME, SUBSTITUTION, Word, tokens

MOST_COMMANDS = 4096
"""Commands that loops within loops are followed for."""

_ASSIGNMENT = re.compile(rf"({NAME}(?:\[\d+\])?)(\+?)=(.*)", re.DOTALL)
_SIMPLE = re.compile(rf"\$({NAME}|\d)")
_BRACED = re.compile(rf"\$\{{([#!]?)({NAME}|\d+)(?:\[([^\]]*)\])?(?::?[-=](.*))?\}}", re.DOTALL)
_LIST = re.compile(rf"\$\{{(!?)({NAME})\[@\]\}}")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)\}|\$\(seq (-?\d+) (-?\d+)\)")
_CHANGED = re.compile(rf"({NAME})\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)({NAME})")
_SUM = re.compile(rf"(?:\s*(?:{NAME}|(?:0|[1-9]\d*)(?!\w)|[-+](?![-+])|[*/%()]))+\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)")
_KEYWORDS = frozenset(["if", "then", "else", "elif", "fi", "do", "done", "while", "until", "!", "{", "}", "time"])
_OPENING, _CLOSING = frozenset(("then", "do", "else")), frozenset(("fi", "done", "else", "elif"))
_DECLARATIONS = frozenset(["export", "declare", "typeset", "local", "readonly", "set"])


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
    reader = _LineReader(dict(variables or {}), dict(settings or {}))
    commands: list[list[Word]] = [[]]
    for token in tokens(text.replace("\r\n", "\n")):
        if isinstance(token, Word):
            commands[-1].append(token)
        elif commands[-1]:
            commands.append([])
    reader.run([words for words in commands if words])
    return Script(tuple(reader.commands), frozenset(reader.used), reader.settings)


def number(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of sums and products of whole numbers; None for other expressions, and where a name has no number."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(constant)):
                return constant
            case ast.Name(id=name) if _NUMBER.fullmatch(variables[name]):
                return int(variables[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(op=op, left=left, right=right):
                one, other = value(left), value(right)
                match op:
                    case ast.Add():
                        return one + other
                    case ast.Sub():
                        return one - other
                    case ast.Mult():
                        return one * other
                # A shell rounds towards zero, Python downwards.
                if isinstance(op, ast.Div | ast.Mod) and one >= 0 and other > 0:
                    return one // other if isinstance(op, ast.Div) else one % other
        raise ValueError(f"{ast.dump(node)} is no sum")

    try:
        result = value(ast.parse(text.strip(), mode="eval").body) if len(text) < 200 and _SUM.fullmatch(text) else None
    except (SyntaxError, ValueError, KeyError):
        return None
    return result if result is not None and abs(result) < 2**63 else None


class _LineReader:
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
            counted = bool(words) and words[0].bare == "for"
            end = _loop_end(commands, at) if counted or keyword in ("while", "until") else 0
            if end:
                body = [commands[at][1:], *commands[at + 1 : end]]
                before = self.variables, self.commands
                self.variables, self.commands = dict(self.variables), list(self.commands)
                if counted and commands[at][0].bare == "do" and self._for(words, body):
                    # The loop's `done` closes no block.
                    commands = [*commands[:end], commands[end][1:], *commands[end + 1 :]]
                    at = end
                else:
                    self.variables, self.commands = before
                    self._forget([words[1:2] if counted else words, *body], {words[1].bare} if counted and words[1:] else set())
            elif words:
                self._command(words)

    def _for(self, words: list[Word], body: list[list[Word]]) -> bool:
        """Follows `for NAME in LIST`; False where its rounds are not known, or are too many."""
        header = words[1].bare if len(words) > 1 else ""
        values = self._values(words[3:]) if len(words) > 2 and words[2].bare == "in" else None
        if header in self.settings:
            values = [self.settings[header]]
        for value in values or ():
            self._left -= len(body)
            if self._left < 0:
                return False
            self.variables[header] = value
            self.run([words for words in body if words])
        return values is not None

    def _values(self, words: list[Word]) -> list[str] | None:
        """The values of a loop's list; None where they are not known."""
        values: list[str] = []
        for word in words:
            if match := _RANGE.fullmatch(word.bare):
                first, last = (int(each) for each in match.groups() if each is not None)
                values += [str(each) for each in range(first, min(last, first + MOST_COMMANDS) + 1)]
            else:
                values += self._expand(word)
        return None if any(set(value) & set("$`*?{") for value in values) else values

    def _forget(self, body: list[list[Word]], changed: set[str]) -> None:
        """Variables that a loop changes whose rounds are not known have no value; those that do not depend on the round keep theirs."""
        for command in body:
            for word in command:
                match = _ASSIGNMENT.fullmatch(word.bare) if _is_assignment(word) else None
                if match and re.search(rf"\b{re.escape(match[1])}\b", match[3]):
                    changed.add(match[1])
            changed |= _computed(command)
        self._unset(changed)

    def _unset(self, names: set[str]) -> None:
        for name in names - set(self.settings):
            self.variables.pop(name, None)

    def _command(self, words: list[Word]) -> None:
        """Takes one command: assignments first."""
        first = words[0].bare
        if first in ("for", "case", "function", "esac"):
            return
        if first in _DECLARATIONS:
            self._assign([word for word in words[1:] if _ASSIGNMENT.fullmatch(word.bare)], self.variables)
            return
        if computed := _computed(words):
            self._unset(computed)
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
            self._unset(set(expanded[1:]))
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
        if word in _OPENING:
            self._blocks.append((dict(self.variables), len(self.commands)))

    def _assign(self, words: list[Word], scope: dict[str, str]) -> None:
        for word in words:
            name, plus, _ = _ASSIGNMENT.fullmatch(word.bare).groups()  # type: ignore[union-attr]
            if name in self.settings:
                continue
            if word.array is not None:
                elements = _elements(name, scope) if plus else []
                for key in [key for key in scope if key.startswith(f"{name}[") and not plus]:
                    del scope[key]
                elements += [text for each in word.array for text in self._expand(each)]
                scope |= {f"{name}[{i}]": value for i, value in enumerate(elements)} | self.settings
                continue
            (first, quote), *others = word.parts
            value = " ".join(self._expand(Word(word.line, [(first.partition("=")[2], quote), *others]), split=False))
            scope[name] = scope.get(name, "") + value if plus else value

    def _expand(self, word: Word, split: bool = True) -> list[str]:
        """The words that a word becomes: a variable without quotes may become none or several, and an array always."""
        texts, quoted = [""], False
        for text, quote in word.parts:
            value = text if quote == "'" else self._substitute(text)
            elements = self._list(text) if split and quote != "'" else None
            if elements is not None:
                pieces = elements if quote else [piece for each in elements for piece in each.split()]
            elif split and not quote and value != text and not re.search(r"\$[({]|`|\byour\b", value):
                pieces = value.split()
            else:
                pieces, quoted = [value], quoted or bool(quote)
            if pieces:
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return texts if quoted or texts != [""] else []

    def _list(self, text: str) -> list[str] | None:
        """The elements, or indexes, of an array that is named as a list; None where it is no such name, or no array that is known."""
        match = _LIST.fullmatch(text)
        if not match:
            return None
        values = _elements(match[2], self.variables)
        return ([str(i) for i in range(len(values))] if match[1] else values) or None

    def _substitute(self, text: str) -> str:
        return SUBSTITUTION.sub(lambda match: match[0] if (value := self._value(match[0])) is None else value, text)

    def _value(self, text: str) -> str | None:
        """What a substitution becomes; None where only a running shell knows."""
        if text.startswith("$((") and text.endswith("))"):
            expression = self._substitute(text[3:-2])
            self.used |= set(re.findall(rf"(?<!\w){NAME}", expression))
            value = number(expression, self.variables)
            return None if value is None else str(value)
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
        self.used.add(name)
        values = _elements(name, self.variables)
        if index in ("@", "*"):
            return None if not values or mark == "!" else str(len(values)) if mark else " ".join(values)
        if mark:
            value = self._variable(name) if mark == "#" and index is None else None
            return None if value is None else str(len(value))
        if index is None:
            value = self._variable(name)
        else:
            place = number(self._substitute(index), self.variables)
            value = None if place is None else self.variables.get(f"{name}[{place}]", "" if values else None)
        return value if value is not None or default is None else self._substitute(default)


def _loop_end(commands: list[list[Word]], at: int) -> int:
    """Index of the command with the `done` of the loop whose `do` stands at `at` or behind it; 0 where there is none."""
    depth = 0
    for i in range(at, len(commands)):
        for word in commands[i]:
            if word.bare not in _KEYWORDS:
                break
            depth += (word.bare == "do") - (word.bare == "done")
            if word.bare == "done" and depth == 0:
                return i
    return 0


def _is_assignment(word: Word) -> bool:
    """Whether a word is `NAME=...` with an unquoted name."""
    return bool(word.parts and not word.parts[0][1] and _ASSIGNMENT.match(word.parts[0][0]))


def _computed(words: list[Word]) -> set[str]:
    """Names that `let` or `((...))` sets; what it sets them to is not computed."""
    counts = bool(words) and (words[0].bare == "let" or words[0].bare.startswith("(("))
    return {one or other for word in words for one, other in _CHANGED.findall(word.bare)} if counts else set()


def _elements(name: str, scope: Mapping[str, str]) -> list[str]:
    values: list[str] = []
    while f"{name}[{len(values)}]" in scope:
        values.append(scope[f"{name}[{len(values)}]"])
    return values
