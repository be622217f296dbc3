import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.request_state import Live

REQUEST = Request("r", (10, 11, 12), max_tokens=3, stop_token_ids=frozenset({7}))


@given(st.lists(st.integers(), max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_known_tokens_are_prompt_then_generated(generated, start, count):
    live = Live(REQUEST, 0, 0.0, generated=tuple(generated))
    assert live.known(start, count) == (*REQUEST.prompt, *generated)[start : start + count]
    assert live.total == 3 + len(generated)


def test_phase_follows_from_what_was_launched():
    live = Live(REQUEST, 0, 0.0)
    assert not live.decoding
    live = live.feeding(2, 4, 7, 5.0)
    # One prompt token is left: still a prefill.
    assert (live.decoding, live.computed, live.pages, live.served, live.started_ms) == (False, 2, 4, 7, 5.0)
    live = live.feeding(1, 4, 8, 6.0)
    assert (live.decoding, live.computed, live.started_ms, live.generated) == (True, 3, 5.0, ())
    live = live.stepping(5, 9)
    assert (live.in_flight, live.pages, live.served, live.computed) == (1, 5, 9, 3)
    assert not live.preempted().decoding


def test_a_preempted_request_decodes_when_all_it_generated_was_fed():
    live = Live(REQUEST, 0, 0.0, generated=(5, 6))
    # The last known token may be all that is missing: its seat is filled by a prefill, and by nothing else.
    assert not live.feeding(4, 4, 0, 0.0).decoding
    assert live.feeding(5, 4, 0, 0.0).decoding


def test_what_is_known_at_the_least():
    live = Live(REQUEST, 0, 0.0)
    assert live.least_total == live.feeding(2, 2, 0, 0.0).least_total == 3
    # The last chunk gives a token, and every decode step one or more.
    live = live.feeding(3, 2, 0, 0.0)
    assert live.least_total == 4
    assert live.stepping(2, 0).least_total == 5
    assert live.prefilled("p", (9,), 0, 0.0).stepping(2, 0).least_total == 5
    assert live.stepping(2, 0).prefilled("p", (9,), 0, 0.0).decoded("d", (8, 8), 2, 1, 0).least_total == 6


@pytest.mark.parametrize("steps, ends, context_ends", [(0, False, False), (1, False, True), (2, True, True)])
def test_a_request_surely_ends_when_the_least_is_enough(steps, ends, context_ends):
    live = Live(REQUEST, 0, 0.0).feeding(3, 2, 0, 0.0)
    for _ in range(steps):
        live = live.stepping(2, 0)
    # It wants three tokens; the context holds two beside the prompt.
    assert (live.surely_ends(100), live.surely_ends(5)) == (ends, context_ends)


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
    live = Live(REQUEST, 4, 1.0, first_token_ms=8.0).feeding(3, 2, 1, 3.0).prefilled("p", (5,), 0, 8.0)
    live = live.stepping(2, 2).decoded("d", (6,), 1, 0, 2)
    again = live.preempted()
    assert (again.generated, again.computed, again.pages, again.preemptions) == ((5, 6), 0, 0, 1)
    assert (again.arrival, again.first_token_ms, again.decode_steps) == (4, 8.0, (("d", 1),))


def test_the_record_is_relative_to_submission():
    live = Live(REQUEST, 0, 100.0).feeding(2, 1, 0, 104.0).prefilled("p32", (), 0, 106.0)
    live = live.feeding(1, 1, 1, 107.0).prefilled("p8", (5,), 1, 110.0)
    for name, token, padding in (("d4", 6, 3), ("d2", 8, 1), ("d4", 9, 2)):
        live = live.stepping(1, 2).decoded(name, (token,), 1, 0, padding)
    event = live.finished("length", 130.0)
    record = event.record
    assert (event.prompt_tokens, event.completion_tokens, event.reason, event.message) == (3, 4, "length", None)
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (4.0, 10.0, 30.0)
    assert record.prefill_chunks == ("p32", "p8")
    assert record.decode_steps == (("d2", 1), ("d4", 2))
    assert (record.padded_rows, record.preemptions, record.cached_tokens) == (7, 0, 0)


def test_accepted_drafts_are_recorded_by_place():
    live = Live(REQUEST, 0, 0.0, computed=3, decoding=True, accepted=(0, 0, 0))
    for count, drafted in ((4, 3), (1, 3), (2, 2), (1, 0)):
        live = live.stepping(1, 0).decoded("d", (1,) * count, count, drafted, 0)
    record = live.finished("length", 1.0).record
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position) == (3, 8, (2, 1, 1))
    assert (live.computed, live.in_flight) == (11, 0)
    # A block that the output ended in counts as the device accepted it.
    cut = live.stepping(1, 0).decoded("d", (1,), 3, 3, 0)
    assert (cut.accepted, len(cut.generated) - len(live.generated), cut.computed) == ((3, 2, 1), 1, 14)


def test_a_request_that_never_ran_was_queued_all_its_life():
    record = Live(REQUEST, 0, 100.0).finished("cancelled", 125.0).record
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (25.0, None, 25.0)
