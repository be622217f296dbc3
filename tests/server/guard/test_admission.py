"""server/guard/admission.py: places for requests, of all clients and of each."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import RequestError
from npucompile.server.guard.admission import Admission
from npucompile.server.requests.error_objects import Refusal, error_reply


def refusal(admission, client, count=1, tokens=0):
    with pytest.raises(RequestError) as caught:
        admission.enter(client, count, tokens)
    return caught.value.code


def test_one_client_has_at_most_its_own_and_all_at_most_the_places():
    admission = Admission(places=10, per_client=6)
    leave = admission.enter("a", 6)
    assert refusal(admission, "a") == "too_many_requests"
    admission.enter("b", 4)
    assert refusal(admission, "c") == "queue_full"
    leave()
    assert admission.live == 9
    admission.enter("c")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_what_is_told_to_come_later_has_room_when_nobody_else_is_there(places, per_client, per_tokens, count, tokens, alone):
    busy, empty = Admission(places, per_client, per_tokens), Admission(places, per_client, per_tokens)
    if not alone:
        busy.enter("b")
        with contextlib.suppress(RequestError):
            busy.enter("a", 1, 1)
    try:
        busy.enter("a", count, tokens)
        code = None
    except RequestError as error:
        code = error.code
    status = error_reply(RequestError("", code=code)).status
    if status == 400 and code is not None:
        assert refusal(empty, "a", count, tokens) == code
    else:
        empty.enter("a", count, tokens)


def test_a_client_that_is_alone_has_all_places_and_is_told_that_the_server_is_full():
    admission = Admission(places=3)
    admission.enter("router", 3)
    assert refusal(admission, "router") == "queue_full"
    admission = Admission(places=3, tokens=10)
    admission.enter("router", 1, 8)
    assert refusal(admission, "router", tokens=3) == "queue_full"
    assert refusal(admission, "router", tokens=11) == "too_many_tokens"


def test_a_client_among_others_has_an_equal_part():
    admission = Admission(places=12, per_client=12)
    admission.enter("b")
    admission.enter("c")
    admission.enter("a", 4)
    # Half of the places are free for whoever comes; the others are shared.
    assert refusal(admission, "a") == "queue_full"
    admission.enter("b", 3)
    admission.enter("c", 3)
    assert admission.live == 12


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 4)), max_size=60))
def test_places_are_counted_whatever_comes_and_goes(moves):
    admission, held, leaves = Admission(8, 5), Counter(), {name: [] for name in "abc"}
    for client, count in moves:
        if count > 0:
            try:
                leaves[client] += [admission.enter(client, count)] * count
            except RequestError:
                continue
            held[client] += count
        else:
            for _ in range(min(-count, held[client])):
                leaves[client].pop()()
                held[client] -= 1
        assert admission.live == held.total() <= 8
        assert all(number <= 5 for number in held.values())
    for client, rest in leaves.items():
        for leave in rest:
            leave()
        held[client] = 0
    assert admission.live == 0
    # A client that has left takes no share.
    assert not admission._held


def test_tokens_have_limits_too():
    admission = Admission(places=10, per_client=10, tokens=100, tokens_per_client=60)
    leave = admission.enter("a", 2, 50)
    with pytest.raises(Refusal) as caught:
        admission.enter("a", 1, 11)
    assert (caught.value.name, caught.value.values) == ("too_many_requests.tokens", {"tokens": 11, "held": 50, "most": 60})
    admission.enter("b", 1, 45)
    assert refusal(admission, "c", tokens=6) == "queue_full"
    # Its tokens are its own until the last of its requests has ended.
    leave()
    assert admission.live_tokens == 95
    leave()
    assert admission.live_tokens == 45
    admission.enter("a", 1, 55)
    # What would never fit is not told to come back.
    assert refusal(admission, "c", tokens=61) == "too_many_tokens"
    assert admission.live == 2


def test_a_client_may_have_all_tokens_where_it_has_no_limit_of_its_own():
    admission = Admission(places=10, per_client=10, tokens=100)
    admission.enter("a", 1, 100)
    assert refusal(admission, "b", tokens=1) == "queue_full"
    Admission(places=1, per_client=1).enter("a", 1, 10**9)
