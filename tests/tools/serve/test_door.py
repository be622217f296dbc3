"""tools/serve/door.py: what the reading thread of a door hands to its main one; `test_door_process.py` has doors that serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from npucompile.runtime.engine_host import Health
from npucompile.tools.serve.door import End, EngineLink, Open


def test_a_record_to_end_stops_as_a_signal_does_and_the_second_by_force() -> None:
    door, taken = EngineLink(), list[Any]()
    news = Health({"status": "ok"})
    door.take(news)
    door.engine = SimpleNamespace(take=taken.append)  # type: ignore[assignment]
    door.take(news)
    assert taken == [news]
    opened: Any = Open(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    door.take(opened)
    door.take(End(now=False))
    assert (door.wanted, door.forced) == (True, False)
    door.take(End(now=True))
    door.take(End(now=False))
    assert (door.wanted, door.forced) == (True, True)
    assert door.told.get() is opened
    assert door.told.get() == End(now=False)
