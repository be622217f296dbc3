"""server/engine/lifecycle.py: what a server is doing, from its start to its end."""

from __future__ import annotations

import pytest
from support.texts import byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.server.engine.lifecycle import Lifecycle
from npucompile.server.engine.service import ServedModel, Service


def service(status="ok"):
    return Service(None, byte_codec(), ServedModel("tiny", 16, 256), readiness=lambda: {"status": status, "buckets": 3})


def test_a_server_that_is_leaving_is_not_ready_and_still_takes_what_comes():
    lifecycle = Lifecycle(service("ok"))
    lifecycle.leaving = True
    assert (lifecycle.state()["status"], lifecycle.alive(), lifecycle.ready()) == ("draining", True, False)
    assert lifecycle.admitting() is lifecycle.service


@pytest.mark.parametrize(
    ("served", "draining", "status", "alive", "ready", "code"),
    [
        (None, False, "starting", True, False, "starting"),
        ("ok", False, "ok", True, True, None),
        ("ok", True, "draining", True, False, "draining"),
        ("failed", False, "failed", False, False, None),
        ("stuck", True, "stuck", False, False, "draining"),
    ],
)
def test_states(served, draining, status, alive, ready, code):
    lifecycle = Lifecycle(served and service(served))
    lifecycle.draining = draining
    assert (lifecycle.state()["status"], lifecycle.alive(), lifecycle.ready()) == (status, alive, ready)
    assert lifecycle.state().get("buckets") == (3 if served else None)
    if code is None:
        assert lifecycle.admitting() is lifecycle.serving() is lifecycle.service
    else:
        with pytest.raises(RequestError) as refused:
            lifecycle.admitting()
        assert refused.value.code == code
