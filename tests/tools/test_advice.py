"""tools/advice.py: a module of the adviser."""

from __future__ import annotations

from npucompile.tools.advice import adviser
from npucompile.tools.advisor.plan import listing


def test_a_module_is_given_by_its_room_and_name() -> None:
    assert adviser("plan.listing") is listing
