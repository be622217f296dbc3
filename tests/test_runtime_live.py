from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.live import Live
from npucompile.runtime.request import Request

REQUEST = Request("r", (10, 11, 12), max_tokens=3, stop_token_ids=frozenset({7}))


@given(st.lists(st.integers(), max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_known_tokens_are_prompt_then_generated(generated, start, count):
    live = Live(REQUEST, 0, 0.0, generated=tuple(generated))
    assert live.known(start, count) == (*REQUEST.prompt, *generated)[start : start + count]
    assert live.total == 3 + len(generated)


def test_phase_follows_from_what_is_computed():
    live = Live(REQUEST, 0, 0.0)
    assert not live.decoding
    # One prompt token is left: still a prefill, since nothing was generated.
    assert not live._replace(computed=2).decoding
    assert live._replace(computed=3, generated=(1,)).decoding
    assert not live._replace(computed=3, generated=(1,)).preempted().decoding


def test_output_ends_at_the_first_reason():
    live = Live(REQUEST, 0, 0.0)
    assert live.output((1, 2), 100) == ((1, 2), None)
    assert live.output((1, 2, 3, 4), 100) == ((1, 2, 3), "length")
    assert live.output((1, 7, 3), 100) == ((1, 7), "stop")
    # A stop token in the last place is a stop.
    assert live.output((1, 2, 7), 100) == ((1, 2, 7), "stop")
    # The context holds five tokens, three are the prompt.
    assert live.output((1, 2, 3), 5) == ((1, 2), "length")
    assert live._replace(generated=(1, 2)).output((4,), 100) == ((4,), "length")


def test_preemption_keeps_what_clients_have_seen():
    live = Live(REQUEST, 4, 1.0, pages=2, first_token_ms=8.0).prefilled("p", 3, (5,), 0, (3.0, 8.0), 1).decoded("d", (6,), 2, 2)
    again = live.preempted()
    assert (again.generated, again.computed, again.pages, again.preemptions) == ((5, 6), 0, 0, 1)
    assert (again.arrival, again.first_token_ms, again.decode_steps) == (4, 8.0, (("d", 1),))


def test_the_record_is_relative_to_submission():
    live = Live(REQUEST, 0, 100.0)
    live = live.prefilled("p32", 2, (), 0, (104.0, 106.0), 0).prefilled("p8", 1, (5,), 1, (107.0, 110.0), 1)
    live = live.decoded("d4", (6,), 3, 2).decoded("d2", (8,), 1, 3).decoded("d4", (9,), 2, 4)
    event = live.finished("length", 130.0)
    record = event.record
    assert (event.prompt_tokens, event.completion_tokens, event.reason, event.message) == (3, 4, "length", None)
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (4.0, 10.0, 30.0)
    assert record.prefill_chunks == ("p32", "p8")
    assert record.decode_steps == (("d2", 1), ("d4", 2))
    assert (record.padded_rows, record.preemptions, record.cached_tokens) == (7, 0, 0)


def test_a_request_that_never_ran_was_queued_all_its_life():
    record = Live(REQUEST, 0, 100.0).finished("cancelled", 125.0).record
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (25.0, None, 25.0)
