"""What bodies of routers say of a handover; `tests/clients/test_paired_routers.py` has the routers."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.fleet.routed import answered, choice_of, is_probe, rooms_of
from npucompile.server.requests.router_fields import HandoverFields

ANSWERED = {"do_remote_prefill": True, "remote_engine_id": "10.0.0.1:15000", "remote_request_id": "7"}


@pytest.mark.parametrize(
    ("fields", "place", "rooms"),
    [
        ({"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 5}, "p:8998", (5,)),
        ({"bootstrap_host": "p", "bootstrap_room": 5}, "p", (5,)),
        ({"bootstrap_host": ["p", "p"], "bootstrap_port": [1, 1], "bootstrap_room": [5, 6]}, "p:1", (5, 6)),
        ({"kv_transfer_params": ANSWERED}, "10.0.0.1:15000", (7,)),
    ],
)
def test_a_decode_server_is_told_where_and_which(fields: dict[str, Any], place: str, rooms: tuple[int, ...]) -> None:
    choice = choice_of(HandoverFields(**fields))
    assert (choice.place, choice.rooms) == (place, rooms)
    # Copies share the rooms.
    assert [choice.take() for _ in range(2 * len(rooms))] == [*rooms, *rooms]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bootstrap_host": "p"}, "bootstrap_room is None"),
        ({"bootstrap_host": "p", "bootstrap_room": [5, None]}, "a number above 0 for each prompt"),
        ({"bootstrap_room": 5}, "bootstrap_host is None"),
        ({"bootstrap_host": ["p", "q"], "bootstrap_room": [5, 6]}, "one prefill server a body"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "what a prefill server has answered"),
        ({"kv_transfer_params": {**ANSWERED, "remote_request_id": "x"}}, "what a prefill server has answered"),
        ({"kv_transfer_params": {**ANSWERED, "remote_request_id": "9" * 5000}}, "a number up to 9223372036854775807"),
        ({"kv_transfer_params": {**ANSWERED, "remote_request_id": 2**63}}, "a number up to 9223372036854775807"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        choice_of(HandoverFields(**fields))


def test_a_prefill_server_waits_for_rooms_and_not_for_vllms_first_call() -> None:
    assert rooms_of(HandoverFields(bootstrap_room=[5, 6])) == (5, 6)
    assert rooms_of(HandoverFields(kv_transfer_params={"do_remote_decode": True})) == ()
    assert is_probe(HandoverFields(bootstrap_host="2.2.2.2", bootstrap_room=0))
    assert answered("/generate", {})["text"] == ""
    assert answered("/v1/completions", {"kv_transfer_params": {}})["object"] == "text_completion"
