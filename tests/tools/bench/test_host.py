"""tools/bench/host.py: a device of a fixed step time, and what is counted beside it."""

from __future__ import annotations

import numpy as np
import pytest

from npucompile.graphs.errors import RequestError
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import FinishEvent, Request
from npucompile.tools.bench.host import PROMPT, FixedDevice, HostLoad


def test_there_is_room_for_all_streams_and_steps_follow_one_another() -> None:
    load = HostLoad(streams=13, groups=2, tokens=40, step_ms=2.0)
    device = FixedDevice(load, 100)
    engine, ends = Engine(device, measured=True, refresh_every_s=None), list[FinishEvent]()  # type: ignore[arg-type]
    for number in range(load.streams):
        request = Request(str(number), (1,) * PROMPT, load.tokens)
        engine.submit(request, lambda event: ends.append(event) if isinstance(event, FinishEvent) else None)
    while engine.step():
        pass
    assert [(end.reason, end.completion_tokens) for end in ends] == [("length", 40)] * 13
    assert not any(end.record.preemptions for end in ends)
    gaps = np.diff(device.began) * 1e3
    # Two or three tokens a step, and fewer than 0.9 of the streams at the end.
    assert 40 / 3 - 2 <= len(device.began) <= 20
    assert gaps.min() > 2.0 - 1e-6
    with pytest.raises(RequestError, match="tokens"):
        engine.submit(Request("long", (1,) * device.limits.max_model_len, 1), lambda _: None)
