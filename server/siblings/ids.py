"""Ids of responses, which say which door made them."""

from __future__ import annotations

import re
import uuid

MOST_DOORS = 256
"""An id has two digits for its door."""

_FORM = re.compile(r"resp_([0-9a-f]{2})[0-9a-f]{30}")


def new_response_id(door: int | None = None) -> str:
    """An identifier no other response has; of one of several doors it begins with the door's number."""
    digits = uuid.uuid4().hex
    return f"resp_{digits if door is None else f'{door:02x}{digits[2:]}'}"


def door_of(response_id: str) -> int | None:
    """The door that made an id, where one of several did; None for what is no id of ours."""
    form = _FORM.fullmatch(response_id)
    return int(form[1], 16) if form else None
