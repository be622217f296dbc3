"""server/storage/replay.py: a client that was cut off gets exactly what it has not seen, or is told that it is gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import RequestError
from npucompile.server.requests.frames import JSON, encode_bytes
from npucompile.server.storage.replay import KeptEvents


def event(number, text=""):
    return {"type": "x", "sequence_number": number, "delta": text}


@given(st.lists(st.lists(st.text(max_size=20), max_size=3), max_size=12), st.integers(0, 400), st.data())
def test_behind_every_event_are_those_that_came_after_it(batches, limit, data):
    replay, events = KeptEvents(limit), []
    for batch in batches:
        new = [event(len(events) + place, text) for place, text in enumerate(batch)]
        events += new
        replay.append(new)
    kept = replay.size_bytes
    assert kept <= limit
    number = data.draw(st.integers(-1, len(events) + 1))
    lost = next(n for n in range(len(events) + 1) if sum(len(encode_bytes(e, JSON)) for e in events[n:]) == kept)
    if number >= len(events):
        code = "invalid_field"
    elif number + 1 < lost:
        code = "events_expired"
    else:
        assert replay.after(number) == events[number + 1 :]
        return
    with pytest.raises(RequestError) as caught:
        replay.after(number)
    assert (caught.value.code, caught.value.param) == (code, "starting_after")
