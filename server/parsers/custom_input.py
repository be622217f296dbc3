"""The text of a custom tool's call, which the model writes as the one argument of a function, as it comes."""

from __future__ import annotations

import json
import re

from ..requests.items import without_halves
from ..requests.tool_fields import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_UNIT = re.compile(
    r'(?P<plain>[^"\\]+)'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\[^u]"
    r"|(?P<wrong>\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))"
)
"""Characters of a JSON text that are whole: what follows half of a surrogate pair decides about it. What is no escape stands for itself."""


class CustomInput:
    """One call's input. Arguments that are not the one text are the input as they are: nothing that a model wrote is lost."""

    def __init__(self) -> None:
        self._pending = ""
        self._inside = self._ended = False

    def push(self, arguments: str) -> str:
        """The text that is certain with more of the arguments."""
        self._pending += arguments
        if not self._inside:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._inside, self._pending = True, self._pending[head.end() :]
        text, place = [], 0
        while not self._ended and (unit := _UNIT.match(self._pending, place)):
            text.append(_character(unit))
            place = unit.end()
        self._pending = self._pending[place:]
        self._ended = self._ended or self._pending.startswith('"')
        return "".join(text)

    def finish(self) -> str:
        """The rest; of a text that was cut within an escape, nothing."""
        return "" if self._inside else self._pending


def _character(unit: re.Match[str]) -> str:
    if unit["plain"] or unit["wrong"]:
        return unit.group()
    try:
        return without_halves(str(json.loads(f'"{unit.group()}"')))
    except ValueError:
        return unit.group()
