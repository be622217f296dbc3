"""server/storage/store.py: what is kept is bounded in bytes and in time, and opens for its owner alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.requests.error_objects import Refusal
from npucompile.server.requests.items import ChatMessage
from npucompile.server.requests.pictures import PictureBytes, PicturePart
from npucompile.server.storage.store import ENTRY_BYTES, ResponseStore, StoredResponse


class Run:
    """Notes that it was evicted."""

    def __init__(self):
        self.kept = True

    def unkept(self):
        self.kept = False


def entry(name, owner="", text="", run=None):
    return StoredResponse(name, owner, None if run else (ChatMessage("user", text),), None, None, run)


ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcdef"), st.integers(0, 3000)),
    st.tuples(st.just("find"), st.sampled_from("abcdef"), st.none()),
    st.tuples(st.just("remove"), st.sampled_from("abcdef"), st.none()),
    st.tuples(st.just("wait"), st.none(), st.integers(1, 60)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_it_is_a_list_of_what_was_named_last_and_fits(actions):
    now = [0.0]
    store = ResponseStore(5000, 100.0, lambda: now[0])
    model: dict[str, tuple[int, float]] = {}
    for action, name, number in actions:
        if action == "wait":
            now[0] += number
        elif action == "put":
            one = entry(name, text="x" * number)
            store.put(one)
            model.pop(name, None)
            model[name] = (one.size_bytes, now[0])
        elif action == "remove":
            store.remove(name)
            model.pop(name, None)
        model = {key: (size, at) for key, (size, at) in model.items() if now[0] - at <= 100}
        while sum(size for size, _ in model.values()) > 5000:
            del model[next(iter(model))]
        if action == "find":
            found = store.find(name, ("",))
            assert (found is not None) == (name in model)
            if found:
                model[name] = (model.pop(name)[0], now[0])
        if action != "wait":
            assert store.size_bytes <= 5000
    assert {name for name in "abcdef" if store.find(name, ("",))} == set(model)
    assert store.size_bytes == sum(size for size, _ in model.values())


def test_only_its_owner_may_name_a_response():
    store = ResponseStore(10_000, 100.0)
    store.put(entry("a", "key one"))
    store.put(entry("b", "socket"))
    assert store.find("a", ("key two", "")) is None
    assert store.find("a", ("key two", "key one")).response_id == "a"
    with pytest.raises(Refusal) as caught:
        store.named("a", ("key two",))
    assert (caught.value.name, caught.value.values) == ("response_not_found", {"response": "'a'"})
    store.forget("socket")
    assert (store.find("b", ("socket",)), len(store)) == (None, 1)


def test_a_conversation_is_there_when_the_response_has_ended_well():
    store = ResponseStore(10_000, 100.0)
    store.put(entry("a", text="hi"))
    store.put(entry("b", run=Run()))
    store.put(StoredResponse("c", ""))
    assert store.conversation("a", ("",)) == (ChatMessage("user", "hi"),)
    for name, why in (("b", "has not ended"), ("c", "has failed"), ("d", "is not known here")):
        with pytest.raises(Refusal) as caught:
            store.conversation(name, ("",))
        assert (caught.value.name, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert caught.value.values == {"response": repr(name), "why": why}

    store.put(StoredResponse("n", "", completions=2))
    with pytest.raises(Refusal) as caught:
        store.conversation("n", ("",))
    assert (caught.value.name, caught.value.values["count"]) == ("unsupported_value.outputs", 2)


def test_a_response_that_runs_is_told_that_it_is_not_kept():
    store, run = ResponseStore(2 * ENTRY_BYTES, 100.0), Run()
    store.put(entry("a", run=run))
    assert run.kept
    store.put(entry("b", text="x" * 500))
    assert not run.kept


def test_a_store_without_room_keeps_nothing():
    store = ResponseStore(0, 100.0)
    store.put(entry("a"))
    assert (store.keeps, len(store), store.size_bytes) == (False, 0, 0)


def test_stored_pictures_count_once():
    file = PictureBytes(bytes(10**6))
    part = PicturePart("", "p", file)

    def entry(name, *parts):
        return StoredResponse(name, "", (ChatMessage("user", "", parts),))

    store = ResponseStore(3 * 10**6, 100)
    store.put(entry("a", part))
    store.put(entry("b", part, PicturePart("", "q", file)))
    store.put(entry("c", part))
    assert 10**6 < store.size_bytes < 1.1 * 10**6
    store.remove("a")
    store.put(entry("b", part))
    assert 10**6 < store.size_bytes < 1.1 * 10**6
    store.put(entry("d", PicturePart("", "p", PictureBytes(bytes(10**6)))))
    assert 2 * 10**6 < store.size_bytes < 2.1 * 10**6
    store.remove("b")
    store.remove("c")
    store.remove("d")
    assert store.size_bytes == 0
