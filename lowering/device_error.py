"""Errors of a device's runtime by name: torch_npu, torchair and HCCL raise RuntimeError for everything, with a number in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..graphs.errors import LoweringError

OUT_OF_MEMORY = "out of memory"
_CODES = (r"error code(?: is|:)?\s*(\d{6})\b", r"(?<![\w.])([1235]\d{5})(?![\w.]\w)", r"\b(E[A-Z0-9]\d{4})\b")
"""ACL's number, anywhere or behind the words, and the codes of CANN's components, as in EZ9999."""


class DeviceError(LoweringError):
    """Raised when the runtime of a device fails.

    Attributes:
        code: see `code_of`.
    """

    def __init__(self, what: str, text: str) -> None:
        self.code = code_of(text)
        super().__init__(f"{what} failed: {text}")


def code_of(text: str) -> str:
    """The runtime's error code in the text of an error, as `507015` or `EZ9999`; "out of memory"; "" where it has none."""
    if OUT_OF_MEMORY in text.lower():
        return OUT_OF_MEMORY
    return next((match[1] for code in _CODES if (match := re.search(code, text))), "")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raises what the runtime raises within as a `DeviceError`.

    Args:
        what: the call, as `a step on npu:0`.
    """
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(what, str(error)) from error
