"""The access log: a JSON object a line for every HTTP exchange, every websocket and every engine request, each with an id.

- `http`: method, path without its query (which may hold secrets), status, ms. Its `id` is the client's `X-Request-Id`, if that is up to
  MAX_ID_CHARS printable characters, else a new one; the response has it in the same header.
- `websocket`: path, close code, ms.
- `request`: what the engine did, at its end: reason, tokens, times, drafts. Its `id` is that of the response (`resp_...`,
  `cmpl-...`, `chatcmpl-...`), which clients see; of further prompts and completions of one response it ends with their index. SGLang's
  `/generate` answers with another id, its `rid`.

Lines are queued and written by a thread of their own, so that a slow disk holds up neither the event loop nor a step.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...runtime.request import FinishEvent

log = logging.getLogger(__name__)

HEADER = "x-request-id"
MAX_ID_CHARS = 128
NO_STATUS = 1006
"""Close code of a websocket that ended without one, as RFC 6455 has it."""


class AccessLog:
    """Writes lines; `opened` makes one.

    Args:
        write: takes a line, without waiting.
        clock: Unix time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._write = write
        self._clock = clock

    @staticmethod
    @contextmanager
    def opened(file: Path | None) -> Iterator[AccessLog]:
        """A log that is written for the length of a `with`, to the end of a file, or to standard output.

        The file may be renamed or removed while the log is open (logrotate does); the next line starts a new one. A new one is its user's
        alone to read. Lines that cannot be written are lost, which is said once, and end nothing.
        """
        target = _Out(sys.stdout) if file is None else _OutFile(file, encoding="utf-8")
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler, listener = QueueHandler(lines), QueueListener(lines, target)
        listener.start()

        def write(line: str) -> None:
            handler.handle(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))

        try:
            yield AccessLog(write)
        finally:
            listener.stop()
            target.close()

    def ended(self, end: FinishEvent) -> None:
        """Logs the end of an engine request."""
        record = end.record
        self._log(
            "request",
            end.request_id,
            reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=end.completion_tokens,
            queue_ms=_rounded(record.queue_ms),
            first_token_ms=_rounded(record.first_token_ms),
            total_ms=_rounded(record.total_ms),
            preemptions=record.preemptions,
            drafted_tokens=record.drafted_tokens,
            accepted_tokens=sum(record.accepted_per_position),
        )

    def around(self, app: ASGIApp) -> ASGIApp:
        """An application that logs what goes through this one."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._http(app, scope, receive, send)
            elif scope["type"] == "websocket":
                await self._websocket(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return logged

    async def _http(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        name, began, status = _id_of(scope), time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await app(scope, receive, answer)
        finally:
            self._log("http", name, **_place(scope), method=scope["method"], status=status, ms=_since(began))

    async def _websocket(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        name, began, code = _id_of(scope), time.perf_counter(), NO_STATUS

        async def hear() -> Message:
            nonlocal code
            message = await receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code", code)
            return message

        async def answer(message: Message) -> None:
            nonlocal code
            if message["type"] == "websocket.close":
                code = message.get("code", 1000)
            elif message["type"] == "websocket.http.response.start":
                # Refused before it was a websocket.
                code = message["status"]
            await send(message)

        try:
            await app(scope, hear, answer)
        finally:
            self._log("websocket", name, **_place(scope), code=code, ms=_since(began))

    def _log(self, event: str, name: str, **fields: Any) -> None:
        moment = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._write(json.dumps({"time": moment, "event": event, "id": name, **fields}))


class _Out(logging.StreamHandler[TextIO]):
    """Writes lines to a stream."""

    _said = False

    def emit(self, record: logging.LogRecord) -> None:
        self._lost = False
        try:
            super().emit(record)
        except OSError as error:
            # A file that was renamed could not be written to its end, or not be begun anew.
            self._tell(error)
        self._said = self._lost

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's
        self._tell(sys.exc_info()[1])

    def close(self) -> None:
        # What is still to be written has nowhere to go.
        try:
            super().close()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        self._lost = True
        if not self._said:
            log.error("the access log cannot be written, and lines are lost: %s", error)


class _OutFile(_Out, WatchedFileHandler):
    """Writes them to a file."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_private)

    def reopenIfNeeded(self) -> None:  # noqa: N802 - logging's
        try:
            super().reopenIfNeeded()
        except OSError as error:
            # What the renamed file had no room for is lost.
            self._tell(error)
            if self.stream is not None:
                with suppress(OSError):
                    self.stream.close()
            self.stream = self._open()
            self._statstream()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _id_of(scope: Scope) -> str:
    given = Headers(scope=scope).get(HEADER, "")
    return given if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable() else f"req_{uuid.uuid4().hex}"


def _place(scope: Scope) -> dict[str, Any]:
    client = scope.get("client")
    return {"client": client[0] if client else None, "path": scope["path"]}


def _since(began: float) -> float:
    return round(1e3 * (time.perf_counter() - began), 3)


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)
