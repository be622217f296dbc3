"""Answers over HTTP: all at once, or as server-sent events while the completions run.

A stream whose frames cannot be made ends with an error. A client that disconnects ends its completions. One that reads too slowly loses
its connection: without the end of the stream, so that it cannot take what it got for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.output_stream import CompletionEnd
from ..guard.door import CHUNKS
from ..requests.error_objects import error_reply, failure_of
from ..requests.frames import JSON, encode_bytes
from .errors import failure, failure_object
from .live import TooSlow

log = logging.getLogger(__name__)

In = TypeVar("In")
Given = TypeVar("Given")

DONE = b"data: [DONE]\n\n"


class Frames(Generic[In]):
    """Makes the frames of one stream.

    Attributes:
        failed: whether the stream has told an error, and is over: what follows is not asked for.
    """

    failed = False

    def begin(self) -> Sequence[bytes]:
        """Before anything has come."""
        return ()

    def feed(self, outputs: Sequence[In]) -> Sequence[bytes]:
        """For what has come."""
        raise NotImplementedError

    def end(self) -> Sequence[bytes]:
        """When all completions have ended."""
        return [DONE]

    def fault(self, error: Exception) -> Sequence[bytes]:
        """The last frames where the server failed to make others."""
        return [frame({"error": error_reply(error).as_object()}), DONE]


class OutputSource(Protocol[Given]):
    """Where the outputs come from: `Live`, or an `EventReader`."""

    ended: asyncio.Event
    overflow: asyncio.Event

    async def take(self, at_once: Callable[[list[Given]], None] | None = None) -> list[Given]:
        """What has come since the last call; see `Inbox`."""

    def wake(self) -> None:
        """Whoever waits in `take` waits no more."""

    def cancel(self) -> None:
        """Nobody waits for more."""


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def failure_frames(message: str | None, code: str | None = None) -> list[bytes]:
    """The last frames of a stream whose completion failed."""
    return [frame({"error": failure_object(failure_of(message), code)}), DONE]


def frame(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    name = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (name, encode_bytes(data, JSON))


class EventStream(Response):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, live: OutputSource[Given], frames: Frames[Given]) -> None:
        self.status_code = 200
        self.background = None
        # Proxies such as nginx would hold events back.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._live: OutputSource[Any] = live
        self._frames: Frames[Any] = frames
        self._ahead: list[Any] = []
        self._chunk: Callable[[bytes], bool] | None = None
        self._unsent = b""
        self._fault: Exception | None = None

    async def begun(self, receive: Receive) -> None:
        """Waits for the first output.

        Raises:
            Exception: it is the failure of a completion.
            ClientGone: nobody waits for it any more.
        """
        taking, leaving = asyncio.ensure_future(self._live.take()), asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait([taking, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise ClientGone
            self._ahead = taking.result()
            for entry in self._ahead:
                end = entry[1] if isinstance(entry, tuple) else None
                if isinstance(end, CompletionEnd) and end.reason == "error":
                    raise failure(end)
        except BaseException:
            self._live.cancel()
            raise
        finally:
            taking.cancel()
            leaving.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._chunk = scope.get("extensions", {}).get(CHUNKS)
        tasks = [asyncio.create_task(part) for part in (self._write(send), gone(receive), self._live.overflow.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._live.cancel()
            for task in tasks:
                task.cancel()
            written, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        if self._live.overflow.is_set():
            log.warning("a client read too slowly; its completions were cancelled and its connection closed")
        elif isinstance(written, Exception):
            raise written

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frames in self._made():
            if frames:
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _at_once(self, outputs: list[Any]) -> None:
        """Writes the frames of what has come, where no task has to wait for the client."""
        assert self._chunk
        try:
            frames = b"".join(self._frames.feed(outputs))
        except Exception as error:
            self._fault = error
        else:
            if not self._frames.failed and self._chunk(frames):
                return
            self._unsent = frames
        self._live.wake()

    async def _made(self) -> AsyncIterator[Sequence[bytes]]:
        """The frames; where they cannot be made, those of an error are the last."""
        try:
            yield self._frames.begin()
            while not self._frames.failed:
                outputs = self._ahead or await self._live.take(self._at_once if self._chunk else None)
                if self._fault:
                    raise self._fault
                if not (outputs or self._unsent):
                    break
                unsent, self._unsent, self._ahead = self._unsent, b"", []
                yield (unsent, *(() if self._frames.failed else self._frames.feed(outputs)))
            if not self._frames.failed:
                yield self._frames.end()
        except TooSlow:
            raise
        except Exception as error:
            log.exception("a stream failed")
            yield self._frames.fault(error)


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(live: OutputSource[Given], receive: Receive) -> list[Given]:
    """All that the completions become, once they have ended.

    Raises:
        ClientGone: nobody waits for it any more; the completions have been cancelled.
        Exception: the server failed to make it.
    """
    tasks = [asyncio.create_task(live.ended.wait()), asyncio.create_task(gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not live.ended.is_set():
            raise ClientGone
        outputs: list[Given] = []
        while some := await live.take():
            outputs += some
        return outputs
    finally:
        live.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
