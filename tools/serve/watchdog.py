"""Watches that the engine's steps end: one that hangs ends the server with an error instead of all its clients waiting."""

from __future__ import annotations

import math
import threading
import time

from ...runtime.engine import Engine

POLLS = 8
"""How often within the time limit is looked."""


def watch(engine: Engine, limit_s: float) -> None:
    """Starts a thread that gives the engine up when a step has taken longer than `limit_s`; without a limit it starts none."""
    if math.isinf(limit_s):
        return

    def run() -> None:
        while engine.failure is None:
            if engine.step_age_s > limit_s:
                engine.give_up(f"a step has not ended within {limit_s:g} s, the time that --step-timeout gives it")
            time.sleep(min(1.0, limit_s / POLLS))

    threading.Thread(target=run, name="npucompile-watchdog", daemon=True).start()
