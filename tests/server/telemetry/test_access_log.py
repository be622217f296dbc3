"""server/telemetry/access_log.py: a line for each exchange, socket and request, over a real port, with ids that clients see."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.texts import byte_codec
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from npucompile.runtime.request import ExecutionRecord, FinishEvent, Request, TokenEvent
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import serving
from npucompile.server.telemetry.access_log import MAX_ID_CHARS, AccessLog

MODEL = ServedModel("tiny", max_model_len=16, vocab_size=300)
END = ExecutionRecord(queue_ms=1.00049, first_token_ms=2.5, total_ms=9.0, drafted_tokens=6, accepted_per_position=(2, 1))


class Engine:
    """Answers every request at once with one token."""

    on_end: Callable[[FinishEvent], None]

    hold = release = lambda self: None

    def submit(self, request: Request, sink: Callable[[Any], None]) -> None:
        end = FinishEvent(request.id, "length", len(request.prompt), 1, END)
        sink(TokenEvent(request.id, (65,)))
        sink(end)
        self.on_end(end)

    def cancel(self, *request_ids: str) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


def read(file: Path, count: int) -> list[dict[str, Any]]:
    """The lines of a log, once there are as many."""
    deadline = time.monotonic() + 30
    while len(lines := file.read_text().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    entries = [json.loads(line) for line in lines]
    assert len(entries) == count
    assert all(entry.pop("time").endswith("+00:00") for entry in entries)
    return entries


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """The websocket's URL, and the file of the log."""
    engine, file = Engine(), tmp_path / "access.jsonl"
    with AccessLog.opened(file) as log:
        engine.on_end = log.ended
        with serving(Service(engine, byte_codec(), MODEL), access_log=log) as url:
            yield url, file


def get(url: str, path: str, **headers: str) -> tuple[int, str | None]:
    place = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("x-request-id")


def test_an_exchange_has_an_id_that_its_response_has_too(served: Any) -> None:
    url, file = served
    status, own = get(url, "/health?key=secret")
    assert status == 200
    assert get(url, "/nothing", **{"X-Request-Id": "mine-7"}) == (404, "mine-7")
    first, second = read(file, 2)
    assert first.pop("ms") >= 0
    assert first == {"event": "http", "id": own, "client": "127.0.0.1", "path": "/health", "method": "GET", "status": 200}
    assert (second["id"], second["status"], second["path"]) == ("mine-7", 404, "/nothing")
    assert "secret" not in file.read_text()


@pytest.mark.parametrize("given", ["", "x" * (MAX_ID_CHARS + 1), "tab\there", "caf\xe9"])
def test_an_id_that_would_spoil_the_log_is_replaced(served: Any, given: str) -> None:
    url, _ = served
    _, own = get(url, "/health", **{"X-Request-Id": given})
    assert own != given
    assert own is not None
    assert own.startswith("req_")


def test_a_request_over_the_websocket_has_the_id_that_its_client_sees(served: Any) -> None:
    url, file = served
    with connect(url, proxy=None, compression=None) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "ab", "max_output_tokens": 1}))
        while (event := json.loads(socket.recv(timeout=60)))["type"] != "response.incomplete":
            pass
    request, closed = read(file, 2)
    assert request == {
        "event": "request", "id": event["response"]["id"], "reason": "length", "prompt_tokens": 2, "cached_tokens": 0,
        "completion_tokens": 1, "queue_ms": 1.0, "first_token_ms": 2.5, "total_ms": 9.0, "preemptions": 0, "drafted_tokens": 6,
        "accepted_tokens": 3,
    }  # fmt: skip
    assert (closed["event"], closed["path"], closed["code"]) == ("websocket", "/v1/responses", 1000)


def test_a_refused_handshake_is_logged_with_its_status(served: Any) -> None:
    url, file = served
    with pytest.raises(InvalidStatus):
        connect(url, subprotocols=["other"], proxy=None)  # type: ignore[list-item]
    (line,) = read(file, 1)
    assert (line["event"], line["code"]) == ("websocket", 400)


def test_a_log_is_appended_to_and_a_renamed_one_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    for _ in range(2):
        with AccessLog.opened(file) as log:
            log.ended(FinishEvent("a", "stop", 1, 1, END))
    assert len(read(file, 2)) == 2
    with AccessLog.opened(file) as log:
        file.rename(tmp_path / "old")
        log.ended(FinishEvent("b", "stop", 1, 1, END))
    assert [entry["id"] for entry in read(file, 1)] == ["b"]


def test_its_file_is_its_users_alone_unless_another_made_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared.jsonl"
    shared.touch(0o640)
    shared.chmod(0o640)
    for file in (tmp_path / "access.jsonl", shared):
        with AccessLog.opened(file) as log:
            log.ended(FinishEvent("a", "stop", 1, 1, END))
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "access.jsonl", shared)] == [0o600, 0o640]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_full_disk_loses_lines_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, renamed: bool) -> None:
    file = tmp_path / "access.jsonl"
    # Writing to this device fails with ENOSPC.
    file.symlink_to("/dev/full")
    with AccessLog.opened(file) as log:
        for _ in range(3):
            log.ended(FinishEvent("a", "stop", 1, 1, END))
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        if renamed:
            file.unlink()
            while not file.exists() and time.monotonic() < deadline:
                log.ended(FinishEvent("b", "stop", 1, 1, END))
                time.sleep(0.01)
            log.ended(FinishEvent("c", "stop", 1, 1, END))
    assert caplog.text.count("the access log cannot be written, and lines are lost") == 1
    assert not renamed or '"id": "c"' in file.read_text()


def test_without_a_file_it_is_written_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with AccessLog.opened(None) as log:
        log.ended(FinishEvent("a", "error", 1, 0, ExecutionRecord()))
    assert json.loads(capsys.readouterr().out)["reason"] == "error"
