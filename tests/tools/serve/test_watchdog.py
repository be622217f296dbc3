"""tools/serve/watchdog.py: a step that takes too long ends the engine, from outside."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

from npucompile.tools.serve.watchdog import watch


class Engine(SimpleNamespace):
    def give_up(self, message):
        self.failure = message
        self.told.set()


def engine(age_s):
    return Engine(step_age_s=age_s, failure=None, told=threading.Event())


def test_a_step_that_hangs_is_given_up_with_the_option_that_says_so():
    hanging = engine(0.3)
    watch(hanging, 0.2)
    assert hanging.told.wait(60)
    assert hanging.failure == "a step has not ended within 0.2 s, the time that --step-timeout gives it"


def test_steps_that_end_are_left_alone_and_nobody_is_watched_without_a_limit():
    working, unlimited = engine(0.1), engine(10.0)
    watch(working, 0.2)
    watch(unlimited, math.inf)
    assert not working.told.wait(0.5)
    assert not unlimited.told.is_set()
    working.failure = "over"
