"""server/requests/left_out.py: what a prompt does not have is named to the client, logged once and counted, or refused."""

from __future__ import annotations

import logging

import pytest

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.left_out import MAX_LOGGED, LeftOut, LeftOutCounter

PARTS = [LeftOut("tools[1]", "a tool of type 'web_search' is left out"), LeftOut("input[0]", "an item is left out")]


def test_it_is_named_each_time_and_logged_once(caplog):
    counter = LeftOutCounter()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert counter.warnings(PARTS) == tuple({"param": part.param, "message": part.why} for part in PARTS)
        assert counter.warnings(()) == ()
    assert counter.total == 6
    assert sorted(record.args[0] for record in caplog.records) == sorted(part.why for part in PARTS)


def test_the_log_is_bounded_whatever_clients_call_their_tools(caplog):
    counter = LeftOutCounter()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * MAX_LOGGED):
            counter.warnings([LeftOut("tools[0]", f"a tool of type 'x{number}'")])
    assert len(caplog.records) == MAX_LOGGED
    assert counter.total == 3 * MAX_LOGGED


def test_a_strict_server_refuses_it_by_its_place():
    counter = LeftOutCounter(strict=True)
    assert counter.warnings([]) == ()
    with pytest.raises(FieldError, match=r"tools\[1\]: a tool of type 'web_search' .* --strict-fields") as caught:
        counter.warnings(PARTS)
    assert (caught.value.param, caught.value.code, counter.total) == ("tools[1]", "unsupported_value", 0)
