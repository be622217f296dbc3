"""A server that streams over HTTP as OpenAI's completions and chat APIs and SGLang's `/generate` are published to; it has no model."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CACHED = 2
"""Prompt tokens that every usage says were cached."""


class SseServer:
    """Answers every request with the words "a b c ...", as many as are asked for.

    Attributes:
        received: headers and body of every request.
        fault: how requests go wrong: "" not at all; "status" a 400 with an error object; "event" an error object after one token;
            "cut" the stream ends without [DONE]; "garbage" an event that is not JSON; "page" a 502 whose body is HTML.
        url: http://HOST:PORT, while it serves.
    """

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.received: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[SseServer]:
        paths = {"/v1/completions": self._completions, "/v1/chat/completions": self._chat, "/generate": self._generate}
        routes = [Route(path, self._answered(make), methods=["POST"]) for path, make in paths.items()]
        app = Starlette(routes=[*routes, Route("/v1/models", self._models)])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join()

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    def _answered(self, make: Any) -> Any:
        async def answer(request: Request) -> Response:
            body = await request.json()
            self.received.append((dict(request.headers), body))
            if self.fault == "status":
                error = {"message": "it is too long", "type": "invalid_request_error", "param": None, "code": None}
                return JSONResponse({"error": error}, status_code=400)
            if self.fault == "page":
                return Response("<html>bad gateway</html>", status_code=502, media_type="text/html")
            return StreamingResponse(self._events(make(body)), media_type="text/event-stream")

        return answer

    async def _events(self, chunks: Iterator[dict[str, Any]]) -> AsyncIterator[str]:
        for number, chunk in enumerate(chunks):
            if number == 1 and self.fault == "event":
                yield f"data: {json.dumps({'error': {'message': 'the engine died'}})}\n\n"
                return
            if number == 1 and self.fault == "garbage":
                yield "data: {\n\n"
            yield f"data: {json.dumps(chunk)}\n\n"
        if self.fault != "cut":
            yield "data: [DONE]\n\n"

    def _completions(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        base = {"id": "cmpl-1", "object": "text_completion", "model": body["model"]}
        count = body["max_tokens"]
        for word in range(count):
            yield {**base, "choices": [{"index": 0, "text": f" {word}", "finish_reason": None}], "usage": None}
        yield {**base, "choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None}
        if body["stream_options"]["include_usage"]:
            yield {**base, "choices": [], "usage": usage(len(body["prompt"]), count)}

    def _chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": body["model"]}
        count = body["max_completion_tokens"]
        yield {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for word in range(count):
            # A reasoning model's first half.
            field = "reasoning_content" if word < count // 2 else "content"
            yield {**base, "choices": [{"index": 0, "delta": {field: f" {word}"}, "finish_reason": None}]}
        yield {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if body["stream_options"]["include_usage"]:
            yield {**base, "choices": [], "usage": usage(len(body["messages"][0]["content"]), count)}

    def _generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Two tokens an event after the first; the text and the counts are those so far."""
        count = body["sampling_params"]["max_new_tokens"]
        for total in [1, *range(3, count + 1, 2)]:
            meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": total, "cached_tokens": CACHED}
            yield {"text": " w" * total, "meta_info": meta | {"spec_verify_ct": total // 2}}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """A usage object of the completions and chat APIs."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": CACHED}}
