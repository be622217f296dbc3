"""Errors as OpenAI's error objects, the same over HTTP and over the websocket: what is said, with which status, and when to come back.

Messages quote what a client sent, which may be megabytes, so that every text is cut here, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...graphs.errors import ProtocolError, RequestError

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 200

STATUS_BY_CODE: Mapping[str, int] = {
    "invalid_api_key": 401,
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "response_not_found": 404,
    "no_compaction": 404,
    "no_expert_counts": 404,
    "body_too_large": 413,
    "unsupported_encoding": 415,
    "host_not_allowed": 421,
    "too_many_requests": 429,
    "queue_full": 503,
    "not_ready": 503,
    "starting": 503,
    "draining": 503,
    "engine_stopped": 503,
    "no_prefill_server": 503,
    "not_handed_over": 503,
    "timeout": 504,
}
"""HTTP status of an error by its code; every other refusal is 400."""

COME_BACK = "come back later"

REFUSALS: Mapping[str, str] = {
    "invalid_api_key": "the API key {state}; legal is the header `Authorization: Bearer KEY`",
    "origin_not_allowed": "a page of {origin} may not use this server; legal are pages of the server itself, and those that "
    "`npucompile serve --allowed-origin` names",
    "origin_not_allowed.read": "a browser reads this path without saying for which page ({site} Sec-Fetch-Site); legal is POST, "
    "which has an Origin",
    "host_not_allowed": "the request is for host {host}; served here are {names}, addresses in numbers, and what "
    "`npucompile serve --allowed-host` names",
    "too_many_completions": "{count} completions at once, and of one client {most} may wait or run; legal are that many, n of each prompt",
    "too_many_tokens": "the prompts have {tokens} tokens together, and of one client {most} may wait or run; send fewer prompts or "
    "completions at once",
    "too_many_requests.places": "{count} requests more beside {held} that wait or run; one client may have {most}",
    "too_many_requests.tokens": "{tokens} prompt tokens more beside {held} that wait or run; one client may have {most}",
    "too_many_requests.connections": "{peer} has all {most} connections that one address may have open "
    "(`npucompile serve --max-client-connections`); close one first",
    "queue_full.share": "{held} requests of this client wait or run; its share among {clients} clients is {share} of {places}; "
    f"{COME_BACK}",
    "queue_full.places": f"{{held}} requests wait or run, and {{most}} may; {COME_BACK}",
    "queue_full.tokens": f"{{held}} prompt tokens wait or run, and {{most}} may; {COME_BACK}",
    "queue_full.bodies": f"bodies of {{held}} bytes are held, and {{most}} may be; {COME_BACK}",
    "queue_full.connections": f"all {{most}} connections of this server are taken (`npucompile serve --max-connections`); {COME_BACK}",
    "starting": "the server is starting: its model is being built or loaded, and /ready says when it is",
    "not_ready.door": f"the process of this server that keeps the response has ended or is starting; {COME_BACK}",
    "no_role": "{field} asks for a handover between a prefill and a decode server, and this server has neither role "
    "(`npucompile serve --role`); legal is null or absent",
    "no_prefill_role": "this server computes no prompts for decode servers; legal is a server started with `--role prefill`",
    "prefill_role": "this server computes prompts for decode servers (`--role prefill`) and answers none itself; ask one of those",
    "unknown_prefill_server": "{field} names the prefill server {place}; legal are those of `npucompile serve --prefill`: {legal}",
    "no_prefill_server": "no prefill server is connected: {reasons}",
    "draining": "the server is ending and takes no new requests",
    "draining.cut": "the server is ending, and cut this answer at the end of the time for that (`npucompile serve --drain-timeout`)",
    "too_many_streams": "{count} responses run or wait on this socket; the limit is {most}",
    "stream_in_use.response": "response {response} is open on this socket already; legal is one whose connection was lost",
    "stream_in_use.lane": "{lane} has response {response}; legal is a lane without one",
    "response_not_found.socket": "no response with {named} is open on this socket; open streams are {open}",
    "response_not_found": "there is no response with id {response}",
    "response_not_found.unkept": "response {response} was made with store: false, and has ended; its events may still be followed",
    "no_compaction": "conversations are not compacted here; legal is a shorter input, or a response that is asked to sum one up",
    "no_expert_counts": "nothing counts here how often experts are chosen; legal is a build with --expert-counts",
    "not_resumable": "response {response} was not made to be resumed; legal is one with background: true or resumable: true",
    "previous_response_not_found": "Previous response with id {response} not found: it {why}; legal is the whole input without it",
    "unsupported_value.outputs": "Previous response with id {response} has {count} outputs, of which none is the one to go on with; legal "
    "is the whole input, with one of them, without it",
    "events_expired": "starting_after is {number}, and events are kept from {first} on; legal are {least} to {most}",
    "invalid_field.event": "starting_after is {number}; the response has events 0 to {most}",
    "model_not_found": "model is {name}; served here is {names}",
    "model_not_found.listed": "there is no model {name}; served here is {names}",
}
"""What is said where the server's state does not allow a request, by the error's code and, where a code has several, which it is. Illegal
values of fields are told by the validator (`bodies`)."""

TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""Type of an error object by its status; every other is an `invalid_request_error`."""

RETRY_AFTER_S: Mapping[int, int] = {429: 1, 503: 2}
"""After how many seconds to try again, by status."""


class Refusal(RequestError):
    """Raised when the server's state does not allow a request.

    Args:
        name: of its sentence, a key of REFUSALS; the error's code is what comes before a dot.
        param: the request field at fault, or None.
        stream_id: the stream that the message names, where it could be read.
        values: that the sentence tells.
    """

    def __init__(self, name: str, /, *, param: str | None = None, stream_id: str | None = None, **values: object) -> None:
        super().__init__(REFUSALS[name].format_map(values), param=param, code=name.partition(".")[0])
        self.name, self.values, self.stream_id = name, values, stream_id


@dataclass(frozen=True)
class ErrorReply:
    """What a client is told.

    Attributes:
        status: of HTTP.
        code: short and machine-readable; None where HTTP's status says it all.
        param: the field at fault, if it is one.
        stream_id: the stream of a socket that the message named, where it could be read.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    stream_id: str | None = None

    def as_object(self) -> dict[str, Any]:
        """The object under "error"."""
        kind = TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        return {"type": kind, "code": _cut(self.code, MAX_NAME_CHARS), "message": self.message, "param": _cut(self.param, MAX_NAME_CHARS)}

    def headers(self) -> dict[str, str]:
        """Headers of an HTTP response with this error."""
        headers = {"Retry-After": str(RETRY_AFTER_S[self.status])} if self.status in RETRY_AFTER_S else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


class Relayed(RequestError):
    """Raised for a refusal that another server has given.

    Attributes:
        reply: what that server told its client.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message, code=reply.code or "server_error")
        self.reply = reply


def error_reply(error: Exception) -> ErrorReply:
    """What to tell of an exception. Those that are neither ProtocolError nor RequestError are the server's own, and told without detail."""
    if isinstance(error, Relayed):
        return error.reply
    if not isinstance(error, (ProtocolError, RequestError)):
        return ErrorReply(500, "the server failed to handle this message; its log has the reason", "internal_error")
    message = _cut(str(error), MAX_MESSAGE_CHARS) or type(error).__name__
    param, stream_id = getattr(error, "param", None), getattr(error, "stream_id", None)
    return ErrorReply(STATUS_BY_CODE.get(error.code, 400), message, error.code, param, stream_id)


def failure_of(message: str | None) -> str:
    """What is said of a completion that failed, for the reason that the engine gave if it gave one."""
    return message or "the engine gave no reason"


def _cut(text: str | None, chars: int) -> str | None:
    if text is None or len(text) <= chars:
        return text
    return f"{text[:chars]}... ({len(text)} characters)"
