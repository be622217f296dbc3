"""Requests that a router has sent to a prefill and to a decode server: which room joins them, in SGLang's or vLLM's fields.

The decode server asks the prefill server, as for any request. SGLang's routers send the body to both at once: the prefill server's answer
waits until the room that the body names has ended. vLLM's proxies ask the prefill server first: it answers at once, with a number for the
room, since it computes the prompt when the decode server asks for it.
"""

from __future__ import annotations

from typing import Any

from ...graphs.errors import RequestError
from ..engine.choice import RouterChoice
from ..requests.router_fields import MOST_ROOM, HandoverFields

PROBE_HOST = "2.2.2.2"
"""What SGLang's health probes name; nothing is handed over."""


def is_probe(fields: HandoverFields) -> bool:
    """Whether a router only looks whether the server works."""
    return _listed(fields.bootstrap_host)[:1] == [PROBE_HOST]


def rooms_of(fields: HandoverFields) -> tuple[int, ...]:
    """The rooms that SGLang's fields name; none where they are vLLM's.

    Raises:
        RequestError: a room is missing.
    """
    if fields.bootstrap_room is None and fields.kv_transfer_params is not None:
        return ()
    rooms = [room for room in _listed(fields.bootstrap_room) if room]
    if not rooms or len(rooms) != len(_listed(fields.bootstrap_room)):
        raise RequestError(
            f"bootstrap_room is {fields.bootstrap_room}; legal is a number above 0 for each prompt", param="bootstrap_room", code="no_room"
        )
    return tuple(rooms)


def choice_of(fields: HandoverFields) -> RouterChoice:
    """What a decode server is told.

    Raises:
        RequestError: the prefill server or the room is missing.
    """
    rooms, given = rooms_of(fields), fields.kv_transfer_params or {}
    if rooms:
        hosts, ports = _listed(fields.bootstrap_host), _listed(fields.bootstrap_port)
        if not hosts or not hosts[0] or len(set(hosts)) > 1 or len(set(ports)) > 1:
            raise RequestError(
                f"bootstrap_host is {fields.bootstrap_host} and bootstrap_port {fields.bootstrap_port}; legal is one prefill server a body",
                param="bootstrap_host",
                code="no_room",
            )
        return RouterChoice(f"{hosts[0]}:{ports[0]}" if ports and ports[0] else str(hosts[0]), rooms, "bootstrap_host")
    engine, room = given.get("remote_engine_id"), given.get("remote_request_id")
    number = str(room)
    legal = number.isascii() and number.isdecimal() and len(number) < 20 and int(number) <= MOST_ROOM
    if not given.get("do_remote_prefill") or not isinstance(engine, str) or not legal:
        raise RequestError(
            "kv_transfer_params of a decode server are what a prefill server has answered: do_remote_prefill, remote_engine_id and "
            f"remote_request_id, a number up to {MOST_ROOM}",
            param="kv_transfer_params",
            code="no_room",
        )
    return RouterChoice(engine, [int(number)], "kv_transfer_params")


def answered(path: str, more: dict[str, Any]) -> dict[str, Any]:
    """What a prefill server answers a router: a body of the path without a completion, as the decode server has that."""
    if path == "/generate":
        return {"text": "", "meta_info": {"input_token_logprobs": []}, **more}
    # Without usage: vllm-router would give that to the client in place of the decode server's.
    kinds = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
    return {"id": "prefill", "object": kinds.get(path, "response"), "created": 0, "model": "", "choices": [], **more}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
