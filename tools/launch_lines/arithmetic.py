"""Whole numbers as a shell computes them: `$((...))`, `let`, `expr` and loops that count."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping

MOST = 2**63
"""A shell's numbers have 64 bits; a result beyond them is not known."""

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+(?:#\w+)?|[A-Za-z_]\w*|\*\*|<<=?|>>=?|[<>=!]=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a or b)),
    "&&": lambda a, b: int(bool(a and b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b if 0 <= b < 64 else MOST,
    ">>": lambda a, b: a >> b if 0 <= b < 64 else MOST,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    # A shell's quotient is rounded towards zero, and the remainder has the sign of the dividend.
    "/": lambda a, b: (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: (abs(a) % abs(b)) * (-1 if a < 0 else 1),
    "**": lambda a, b: a**b if 0 <= b < 64 else MOST,
}


def evaluate(text: str, variables: MutableMapping[str, str]) -> int | None:
    """The value of an expression; None where a name in it has none, or it is no expression.

    Args:
        variables: names and values, as the script sets them; assignments of the expression change them.
    """
    try:
        return _Expression(text, variables).value()
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def numbers_of(words: list[str]) -> list[str] | None:
    """What `expr` or `seq` prints, a word a number; None for any other command, and for what is not made of whole numbers."""
    if words[:1] == ["expr"]:
        if not all(re.fullmatch(r"-?\d+|[-+*/%()<>]|[<>!=]=|=", word) for word in words[1:]):
            return None
        value = evaluate(" ".join("==" if word == "=" else re.sub(r"^(-?)0+(?=\d)", r"\1", word) for word in words[1:]), {})
        return None if value is None else [str(value)]
    if words[:1] == ["seq"] and 2 <= len(words) <= 4 and all(re.fullmatch(r"-?\d+", word) for word in words[1:]):
        given = [int(word) for word in words[1:]]
        return counted(given[0] if len(given) > 1 else 1, given[-1], given[1] if len(given) > 2 else 1)
    return None


def counted(first: int, last: int, step: int, most: int = 4096) -> list[str] | None:
    """Numbers from the first to the last one; None where there are more than `most`, or the step leads nowhere."""
    if step == 0 or (last - first) // step >= most:
        return None
    return [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]


class _Expression:
    """A parser by precedence that computes as it reads."""

    def __init__(self, text: str, variables: MutableMapping[str, str], depth: int = 0) -> None:
        self.tokens, self.at, self.variables, self.depth = _tokens(text), 0, variables, depth

    def value(self) -> int:
        """The value of the whole text.

        Raises:
            ValueError: it has none.
        """
        result = self._sequence()
        if self.at != len(self.tokens):
            raise ValueError(self.tokens[self.at])
        return result

    def _next(self, *wanted: str) -> str:
        """Takes a token if it is one of those."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def _sequence(self) -> int:
        result = self._assignment()
        while self._next(","):
            result = self._assignment()
        return result

    def _assignment(self) -> int:
        name, then = (*self.tokens[self.at : self.at + 2], "", "")[:2]
        if _is_name(name) and then.endswith("=") and then not in ("==", "<=", ">=", "!="):
            self.at += 2
            before = 0 if then == "=" else self._named(name)
            value = self._assignment()
            return self._set(name, value if then == "=" else _checked(_BINARY[then[:-1]](before, value)))
        return self._choice()

    def _choice(self) -> int:
        condition = self._binary(0)
        if not self._next("?"):
            return condition
        before = dict(self.variables)
        first = self._assignment()
        if not self._next(":"):
            raise ValueError("? without :")
        second = self._choice()
        if self.variables != before:
            raise ValueError("an assignment in a branch that may not be taken")
        return first if condition else second

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        left = self._binary(level + 1)
        while sign := self._next(*_LEVELS[level]):
            left = _checked(_BINARY[sign](left, self._binary(level + 1)))
        return left

    def _power(self) -> int:
        base = self._unary()
        return _checked(_BINARY["**"](base, self._power())) if self._next("**") else base

    def _unary(self) -> int:
        if sign := self._next("++", "--"):
            name = self._name()
            return self._set(name, self._named(name) + (1 if sign == "++" else -1))
        if sign := self._next("-", "+", "!", "~"):
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        if self._next("("):
            value = self._sequence()
            if not self._next(")"):
                raise ValueError("( without )")
            return value
        return self._primary()

    def _primary(self) -> int:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if not _is_name(token):
            self.at += 1
            return _checked(_number(token))
        name = self._name()
        value = self._named(name)
        if sign := self._next("++", "--"):
            self._set(name, value + (1 if sign == "++" else -1))
        return value

    def _name(self) -> str:
        self.at += 1
        if self.at > len(self.tokens) or not _is_name(self.tokens[self.at - 1]):
            raise ValueError("a name is missing")
        return self.tokens[self.at - 1]

    def _named(self, name: str) -> int:
        """The value of a variable, which may be an expression itself. One that is not set is no zero here: another shell may set it."""
        if name not in self.variables or self.depth > 8:
            raise ValueError(name)
        return _Expression(self.variables[name], self.variables, self.depth + 1).value()

    def _set(self, name: str, value: int) -> int:
        self.variables[name] = str(_checked(value))
        return value


def _tokens(text: str) -> list[str]:
    tokens, at, text = list[str](), 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise ValueError(text[at:])
        tokens.append(match[1])
        at = match.end()
    return tokens


def _is_name(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


def _number(token: str) -> int:
    base, mark, digits = token.partition("#")
    if mark:
        return int(digits, int(base))
    if token.lower().startswith("0x"):
        return int(token, 16)
    return int(token, 8 if len(token) > 1 and token.startswith("0") else 10)


def _checked(value: int) -> int:
    if not -MOST <= value < MOST:
        raise ValueError("more than 64 bits")
    return value
