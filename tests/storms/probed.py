"""`npucompile serve` with clocks inside: `python tests/storms/probed.py FILE serve ARTIFACT ...` writes to FILE, when the server ends,
when its event loop and its engine were held up, and by what.

Of every pause it says how much of it the thread computed, and for how much it was ready and had no processor; the rest it waited, for
the interpreter's lock or for a device.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from npucompile.runtime.engine import Engine
from npucompile.server import run
from npucompile.tools import cli

TICK_S, LATE_S, STEP_S, COLLECTION_S = 0.005, 0.025, 0.05, 0.005
FRAMES = 6
"""Innermost calls that are kept of a stack."""

found: dict[str, list[Any]] = {"loop": [], "step": [], "collection": [], "stack": []}


def _clocks() -> tuple[float, float, float]:
    """In seconds: of the machine, of this thread's computing, and of its waiting for a processor."""
    waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return time.monotonic(), time.thread_time(), waited


def _since(before: tuple[float, float, float]) -> dict[str, float]:
    wall, computed, waited = (round((now - then) * 1e3, 1) for now, then in zip(_clocks(), before, strict=True))
    return {"at_s": before[0], "ms": wall, "computed_ms": computed, "no_processor_ms": waited}


class _Ticks:
    """When the loop was last seen alive."""

    at_s = time.monotonic()
    loop_thread = engine_thread = 0


async def _tick() -> None:
    _Ticks.loop_thread = threading.get_ident()
    while True:
        before = _clocks()
        await asyncio.sleep(TICK_S)
        _Ticks.at_s = time.monotonic()
        if _Ticks.at_s - before[0] - TICK_S > LATE_S:
            found["loop"].append(_since(before))


def _sample() -> None:
    """Where the loop and the engine are while the loop is late."""
    while True:
        time.sleep(LATE_S)
        late_s = time.monotonic() - _Ticks.at_s
        if _Ticks.loop_thread and late_s > 2 * LATE_S:
            stacks = sys._current_frames()
            entry: dict[str, Any] = {"at_s": time.monotonic(), "late_ms": late_s * 1e3}
            for name, thread in (("loop", _Ticks.loop_thread), ("engine", _Ticks.engine_thread)):
                if thread in stacks:
                    calls = traceback.extract_stack(stacks[thread])[-FRAMES:]
                    entry[name] = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls]
            found["stack"].append(entry)


def _probe() -> None:
    startup, step, began = run._Server.startup, Engine._step, [(0.0, 0.0, 0.0)]

    async def started(self: Any, sockets: Any = None) -> None:
        await startup(self, sockets)
        self.probe = asyncio.create_task(_tick())

    def stepped(self: Any) -> bool:
        _Ticks.engine_thread = threading.get_ident()
        before = _clocks()
        try:
            return step(self)
        finally:
            if time.monotonic() - before[0] > STEP_S:
                found["step"].append(_since(before))

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = _clocks()
        elif time.monotonic() - began[0][0] > COLLECTION_S:
            found["collection"].append({**_since(began[0]), "generation": info["generation"]})

    run._Server.startup = started  # type: ignore[method-assign]
    Engine._step = stepped  # type: ignore[method-assign]
    gc.callbacks.append(collecting)
    threading.Thread(target=_sample, daemon=True).start()


if __name__ == "__main__":
    out = Path(sys.argv.pop(1))
    _probe()
    try:
        cli.main()
    finally:
        out.write_text(json.dumps(found), encoding="utf-8")
