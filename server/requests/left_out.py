"""What requests have and no prompt can have: the answer names it, the log does once, and `npucompile serve --strict-fields` refuses it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from .fields import FieldError

MAX_LOGGED = 100
"""Sentences that are logged; what clients send names tools in them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeftOut:
    """Part of a request that its prompt does not have.

    Attributes:
        param: where it is.
        why: what it is, and what becomes of it.
    """

    param: str
    why: str


class LeftOutCounter:
    """Counts such parts of all requests; its method may be called on any thread.

    Args:
        strict: requests with them are refused.

    Attributes:
        total: how many there were.
    """

    def __init__(self, strict: bool = False) -> None:
        self.total = 0
        self._strict = strict
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def warnings(self, parts: Sequence[LeftOut]) -> tuple[dict[str, str], ...]:
        """What the answer to a request says of its parts that are left out.

        Raises:
            FieldError: they are refused here.
        """
        if parts and self._strict:
            message = f"{parts[0].param}: {parts[0].why}; legal is a request without it, as this server has --strict-fields"
            raise FieldError(message, param=parts[0].param, code="unsupported_value")
        with self._lock:
            self.total += len(parts)
            for why in {part.why for part in parts} - self._logged if len(self._logged) < MAX_LOGGED else ():
                self._logged.add(why)
                log.warning("a request has what its prompt does not: %s", why)
        return tuple({"param": part.param, "message": part.why} for part in parts)
