"""runtime/refresh.py: what a build finishes is loaded, and what is broken is said once."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import ArtifactError
from npucompile.runtime.executor import ExecutorError
from npucompile.runtime.refresh import Refresher


class Executor:
    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def refresh(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def refresher(*outcomes):
    now = [0.0]

    def clock():
        now[0] += 1
        return now[0]

    return Refresher(Executor(*outcomes), 1.0, clock)


def test_a_broken_manifest_is_said_once_and_without_a_traceback(caplog):
    broken = ArtifactError("manifest.msgpack is no manifest")
    subject = refresher(*[broken] * 10, True, broken, KeyError("a defect"))
    for _ in range(10):
        subject.when_due()
    assert caplog.text.count("manifest.msgpack is no manifest") == 1
    assert "Traceback" not in caplog.text
    # It was mended and is broken again; and a defect of our own has a traceback.
    subject.when_due()
    subject.when_due()
    assert caplog.text.count("manifest.msgpack is no manifest") == 2
    subject.when_due()
    assert "Traceback" in caplog.text


def test_a_lost_device_is_not_swallowed():
    with pytest.raises(ExecutorError):
        refresher(ExecutorError("gone")).when_due()


def test_never_is_never():
    Refresher(Executor(), None, lambda: 0.0).when_due()
