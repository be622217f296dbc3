"""A client: responses over one websocket, as event streams or whole completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from ..graphs.errors import ProtocolError, RequestError
from .requests.frames import JSON, decode, encode
from .response.events import TERMINAL_TYPES, ServerEvent

WEBSOCKET_PATH = "/v1/responses"
"""Where a server speaks over websockets."""

MAX_EVENT_BYTES = 64 * 2**20
MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class CompletionOutput:
    """A finished completion.

    Attributes:
        status: of the response (completed, incomplete or cancelled); with `n` above 1, of the output item (completed or incomplete).
        usage: the usage object of the whole response.
        logprobs: an object per token, as in the output item; empty unless requested.
    """

    response_id: str
    status: str
    text: str
    token_ids: tuple[int, ...]
    usage: dict[str, Any]
    logprobs: tuple[dict[str, Any], ...] = ()


class ResponseStream:
    """The events of one response, in order: `async for event in stream`.

    Ends after the response's last event, or after an `error` event that refused it.
    """

    def __init__(self, client: Client, stream_id: str, body: dict[str, Any]) -> None:
        self.stream_id = stream_id
        self._client = client
        self._body = body
        self._inbox: asyncio.Queue[ServerEvent | ProtocolError] = asyncio.Queue()
        self._started = False
        self._accepted = False
        self._ended = False
        # Whether any event of the response has come, read or not.
        self.begun = False

    async def start(self) -> Self:
        """Sends the request; the first iteration does so otherwise."""
        if not self._started:
            self._started = True
            await self._client._open(self)
        return self

    async def cancel(self) -> None:
        """Asks the server to end the response; its last event is then `response.cancelled`."""
        if self._started and not self._ended:
            await self._client.cancel(stream_id=self.stream_id)

    async def completion(self) -> CompletionOutput:
        """Reads to the end.

        Raises:
            RequestError: the server refused or failed the request, or it is for several completions.
            ProtocolError: the connection went away first.
        """
        _refuse_several(self._body)
        (completion,) = await self.completions()
        return completion

    async def completions(self) -> tuple[CompletionOutput, ...]:
        """Reads to the end; the `n` completions in the order of the response's output.

        Raises:
            RequestError: the server refused the request, or failed any completion.
            ProtocolError: the connection went away first.
        """
        token_ids: dict[int, list[int]] = {}
        last: ServerEvent = {}
        async for event in self:
            last = raise_if_refused(event)
            if "token_ids" in event:
                token_ids.setdefault(event["output_index"], []).extend(event["token_ids"])
        response = last["response"]
        if self._body.get("n") in (None, 1):
            # Reasoning and calls are items beside the message.
            return (_completion(response, _messages(response), [token for ids in token_ids.values() for token in ids]),)
        return tuple(_completion(response, item, token_ids.get(index, [])) for index, item in enumerate(response["output"]))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ServerEvent:
        if self._ended:
            raise StopAsyncIteration
        await self.start()
        item = await self._inbox.get()
        if isinstance(item, ProtocolError):
            self._end()
            raise item
        # One that is resumed may be behind its first event.
        self._accepted = self._accepted or item["type"].startswith("response.")
        # Once the response has started, an error event is about another message that named this stream.
        if item["type"] in TERMINAL_TYPES or (item["type"] == "error" and not self._accepted):
            self._end()
        return item

    def _end(self) -> None:
        self._ended = True
        self._client._forget(self)

    def _put(self, item: ServerEvent | ProtocolError) -> None:
        self.begun = self.begun or (not isinstance(item, ProtocolError) and item["type"].startswith("response."))
        self._inbox.put_nowait(item)


class Client:
    """One connection; any number of responses at a time.

    Use as `async with await Client.connect(url) as client`.
    """

    def __init__(self, websocket: ClientConnection, subprotocol: str) -> None:
        self._websocket = websocket
        self._subprotocol = subprotocol
        self._streams: dict[str, ResponseStream] = {}
        self._created = 0
        self._lost_error: ProtocolError | None = None
        self._reader = asyncio.create_task(self._read())

    @staticmethod
    async def connect(url: str, subprotocol: str = JSON, *, api_key: str | None = None) -> Client:
        """Opens a connection to e.g. ws://127.0.0.1:8000/v1/responses.

        Args:
            api_key: of the server, if it asks for one.

        Raises:
            ProtocolError: nothing answers there, or it does not speak the subprotocol.
        """
        try:
            websocket = await connect(
                url,
                subprotocols=[Subprotocol(subprotocol)],
                additional_headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
                compression=None,
                max_size=MAX_EVENT_BYTES,
                proxy=None,
            )
        except InvalidStatus as refused:
            reason = refused.response.body.decode(errors="replace").strip()
            message = f"{url} refuses the connection with status {refused.response.status_code}: {reason[:MAX_REASON_CHARS]}"
            raise ProtocolError(message, code="connection_refused") from refused
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise ProtocolError(f"cannot connect to {url}: {error}", code="connection_failed") from error
        if websocket.subprotocol != subprotocol:
            await websocket.close()
            raise ProtocolError(f"{url} speaks subprotocol {websocket.subprotocol!r}, not {subprotocol!r}", code="unsupported_subprotocol")
        return Client(websocket, subprotocol)

    def create(self, prompt: str | list[int] | list[dict[str, Any]], *, stream_id: str | None = None, **options: Any) -> ResponseStream:
        """A response to text, token ids or messages.

        Args:
            options: fields of `response.create`, such as max_output_tokens, temperature, seed, stop, top_logprobs (0 to 20),
                n (1 to 8 completions), speculative_tokens (0 is off).
        """
        if stream_id is None:
            stream_id = f"c{self._created}"
            self._created += 1
        ids = isinstance(prompt, list) and not any(isinstance(item, dict) for item in prompt)
        key = "input_token_ids" if ids else "input"
        return ResponseStream(self, stream_id, {"type": "response.create", "stream_id": stream_id, key: prompt, **options})

    def resume(self, response_id: str, *, starting_after: int = -1, stream_id: str | None = None) -> ResponseStream:
        """A response that another connection started, which was lost; it must have been created with `resumable` or `background`.

        Args:
            starting_after: sequence number of the last event that came; -1 for none.
        """
        if stream_id is None:
            stream_id = f"c{self._created}"
            self._created += 1
        body = {"type": "response.resume", "stream_id": stream_id, "response_id": response_id, "starting_after": starting_after}
        return ResponseStream(self, stream_id, body)

    async def cancel(self, *, response_id: str | None = None, stream_id: str | None = None) -> None:
        """Asks the server to end a response."""
        await self._send({"type": "response.cancel", "response_id": response_id, "stream_id": stream_id})

    async def close(self) -> None:
        """Closes the connection; the server cancels what is live on it."""
        await self._websocket.close()
        await self._reader

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _open(self, stream: ResponseStream) -> None:
        if stream.stream_id in self._streams:
            raise ProtocolError(f"stream_id {stream.stream_id!r} is in use on this connection", code="stream_in_use")
        if self._lost_error is not None:
            raise self._lost_error
        self._streams[stream.stream_id] = stream
        await self._send(stream._body)

    def _forget(self, stream: ResponseStream) -> None:
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    async def _send(self, event: dict[str, Any]) -> None:
        # The reader reports a lost connection to the streams, with the reason.
        with contextlib.suppress(ConnectionClosed):
            await self._websocket.send(encode(event, self._subprotocol))

    async def _read(self) -> None:
        try:
            async for frame in self._websocket:
                self._route(decode(frame, self._subprotocol, MAX_EVENT_BYTES))
            self._lose("connection closed")
        except ConnectionClosed as closed:
            self._lose(f"connection lost: {closed}")
        except ProtocolError as error:
            self._lose(f"the server sent something that is no event: {error}")
            await self._websocket.close()
        finally:
            if self._lost_error is None:
                self._lose("the client stopped reading")

    def _route(self, event: ServerEvent) -> None:
        kind, stream_id, detail = event.get("type"), event.get("stream_id"), event.get("error")
        if not isinstance(kind, str) or not isinstance(stream_id, str | None) or (kind == "error" and not isinstance(detail, dict)):
            raise ProtocolError(f"type {kind!r}, stream_id {stream_id!r}, error {detail!r}; legal are text, text or none, an object")
        named = self._streams.get(stream_id or "")
        # The answer to a cancel that arrived after the response had ended; that to a resume is its stream's first event.
        if isinstance(detail, dict) and detail.get("code") == "response_not_found" and (named is None or named.begun):
            return
        if stream_id is not None:
            streams = [self._streams[stream_id]] if stream_id in self._streams else []
        else:
            # The server refused a frame before it could read its stream id.
            streams = [stream for stream in self._streams.values() if kind == "error"]
        for stream in streams:
            stream._put(event)

    def _lose(self, reason: str) -> None:
        self._lost_error = ProtocolError(reason, code="connection_closed")
        for stream in list(self._streams.values()):
            stream._put(self._lost_error)


def raise_if_refused(event: ServerEvent) -> ServerEvent:
    """The event itself.

    Raises:
        RequestError: the event says that the request was refused or failed.
    """
    if event["type"] == "error":
        detail = event["error"]
        raise RequestError(str(detail.get("message")), param=detail.get("param"), code=str(detail.get("code")))
    if event["type"] == "response.failed":
        detail = event["response"]["error"]
        raise RequestError(detail["message"], code=detail["code"])
    return event


def _messages(response: dict[str, Any]) -> dict[str, Any]:
    """The messages of a response with one completion as one item, whose state is the response's."""
    parts = [part for item in response["output"] if item.get("type", "message") == "message" for part in item["content"]]
    return {"content": parts}


def _completion(response: dict[str, Any], item: dict[str, Any], token_ids: list[int]) -> CompletionOutput:
    status = item.get("status", response["status"])
    text = "".join(part["text"] for part in item["content"])
    logprobs = tuple(entry for part in item["content"] for entry in part["logprobs"])
    return CompletionOutput(response["id"], status, text, tuple(token_ids), response["usage"], logprobs)


def _refuse_several(options: Mapping[str, Any]) -> None:
    if options.get("n") not in (None, 1):
        raise RequestError(f"n is {options['n']!r} where one completion is read; legal is 1 (`completions` reads several)", param="n")


async def stream_text(
    url: str, prompt: str | list[int], *, subprotocol: str = JSON, api_key: str | None = None, **options: Any
) -> AsyncIterator[str]:
    """Text deltas of the response to one prompt, over a connection of its own.

    Raises:
        RequestError: the server refused or failed the request, or it is for several completions.
        ProtocolError: it cannot be reached, or the connection went away.
    """
    _refuse_several(options)
    async with await Client.connect(url, subprotocol, api_key=api_key) as client:
        async for event in client.create(prompt, **options):
            if raise_if_refused(event)["type"] == "response.output_text.delta":
                yield event["delta"]
