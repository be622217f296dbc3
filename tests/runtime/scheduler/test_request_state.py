"""runtime/scheduler/request_state.py: how the state of a request advances, and the record it leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.request import ExecutionRecord, Request
from npucompile.runtime.scheduler.request_state import RequestState

REQUEST = Request("r", (10, 11, 12), max_tokens=3, stop_token_ids=frozenset({7}))


@given(st.lists(st.integers(), max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_known_tokens_are_prompt_then_generated(generated, start, count):
    live = RequestState(REQUEST, 0, 0.0, output_token_ids=tuple(generated))
    assert live.token_ids(start, count) == (*REQUEST.prompt, *generated)[start : start + count]
    assert live.num_tokens == 3 + len(generated)


def test_the_phase_follows_from_the_launched_steps():
    live = RequestState(REQUEST, 0, 0.0)
    assert not live.decoding
    live = live.prefill_launched(2, 4, 7, 5.0)
    # One prompt token is left: still a prefill.
    assert (live.decoding, live.num_computed_tokens, live.num_pages, live.last_scheduled, live.started_ms) == (False, 2, 4, 7, 5.0)
    live = live.prefill_launched(1, 4, 8, 6.0)
    assert (live.decoding, live.num_computed_tokens, live.started_ms, live.output_token_ids) == (True, 3, 5.0, ())
    live = live.decode_launched(5, 9)
    assert (live.steps_in_flight, live.num_pages, live.last_scheduled, live.num_computed_tokens) == (1, 5, 9, 3)
    assert not live.preempted().decoding


def test_a_preempted_request_decodes_when_all_it_generated_was_fed():
    live = RequestState(REQUEST, 0, 0.0, output_token_ids=(5, 6))
    # Even if only the last known token is missing it takes a prefill, which fills the request slot.
    assert not live.prefill_launched(4, 4, 0, 0.0).decoding
    assert live.prefill_launched(5, 4, 0, 0.0).decoding


def test_min_num_tokens():
    live = RequestState(REQUEST, 0, 0.0)
    assert live.min_num_tokens == live.prefill_launched(2, 2, 0, 0.0).min_num_tokens == 3
    # The last chunk gives a token, and every decode step one or more.
    live = live.prefill_launched(3, 2, 0, 0.0)
    assert live.min_num_tokens == 4
    assert live.decode_launched(2, 0).min_num_tokens == 5
    assert live.prefill_committed("p", (9,), 0, 0.0).decode_launched(2, 0).min_num_tokens == 5
    assert live.decode_launched(2, 0).prefill_committed("p", (9,), 0, 0.0).decode_committed("d", (8, 8), 2, 1, 0).min_num_tokens == 6


@pytest.mark.parametrize("steps, ends, context_ends", [(0, False, False), (1, False, True), (2, True, True)])
def test_a_request_finishes_in_flight_when_its_fewest_possible_tokens_are_enough(steps, ends, context_ends):
    live = RequestState(REQUEST, 0, 0.0).prefill_launched(3, 2, 0, 0.0)
    for _ in range(steps):
        live = live.decode_launched(2, 0)
    # It wants three tokens; the context holds two beside the prompt.
    assert (live.finishes_in_flight(100), live.finishes_in_flight(5)) == (ends, context_ends)


def test_output_ends_at_the_first_reason():
    live = RequestState(REQUEST, 0, 0.0)
    assert live.clip_output((1, 2), 100) == ((1, 2), None)
    assert live.clip_output((1, 2, 3, 4), 100) == ((1, 2, 3), "length")
    assert live.clip_output((1, 7, 3), 100) == ((1, 7), "stop")
    # A stop token in the last place is a stop.
    assert live.clip_output((1, 2, 7), 100) == ((1, 2, 7), "stop")
    # The context holds five tokens, three are the prompt.
    assert live.clip_output((1, 2, 3), 5) == ((1, 2), "length")
    assert live._replace(output_token_ids=(1, 2)).clip_output((4,), 100) == ((4,), "length")


def test_preemption_keeps_what_clients_have_seen():
    live = RequestState(REQUEST, 4, 1.0).prefill_launched(3, 2, 1, 3.0).prefill_committed("p", (5,), 0, 8.0)
    live = live.decode_launched(2, 2).decode_committed("d", (6,), 1, 0, 2)
    preempted = live.preempted()
    assert (preempted.output_token_ids, preempted.num_computed_tokens) == ((5, 6), 0)
    assert (preempted.num_pages, preempted.record.preemptions) == (0, 1)
    assert (preempted.arrival, preempted.record.first_token_ms, preempted.record.decode_steps) == (4, 7.0, (("d", 1),))


def test_the_record_is_relative_to_submission():
    live = RequestState(REQUEST, 0, 100.0).prefill_launched(2, 1, 0, 104.0).prefill_committed("p32", (), 0, 106.0)
    live = live.prefill_launched(1, 1, 1, 107.0).prefill_committed("p8", (5,), 1, 110.0)
    for name, token, padding in (("d4", 6, 3), ("d2", 8, 1), ("d4", 9, 2)):
        live = live.decode_launched(1, 2).decode_committed(name, (token,), 1, 0, padding)
    event = live.finish_event("length", 130.0)
    record = event.record
    assert (event.prompt_tokens, event.completion_tokens, event.reason, event.message) == (3, 4, "length", None)
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (4.0, 10.0, 30.0)
    assert record.prefill_chunks == ("p32", "p8")
    assert record.decode_steps == (("d2", 1), ("d4", 2))
    assert (record.padded_rows, record.preemptions, record.cached_tokens) == (7, 0, 0)


def test_accepted_drafts_are_recorded_by_place():
    live = RequestState(REQUEST, 0, 0.0, num_computed_tokens=3, decoding=True, record=ExecutionRecord(accepted_per_position=(0, 0, 0)))
    for count, drafted in ((4, 3), (1, 3), (2, 2), (1, 0)):
        live = live.decode_launched(1, 0).decode_committed("d", (1,) * count, count, drafted, 0)
    record = live.finish_event("length", 1.0).record
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position) == (3, 8, (2, 1, 1))
    assert (live.num_computed_tokens, live.steps_in_flight) == (11, 0)
    # Where the output ends inside a block, the record still has what the device accepted.
    cut = live.decode_launched(1, 0).decode_committed("d", (1,), 3, 3, 0)
    assert (cut.record.accepted_per_position, len(cut.output_token_ids) - len(live.output_token_ids), cut.num_computed_tokens) == (
        (3, 2, 1),
        1,
        14,
    )


def test_a_request_that_never_ran_was_queued_all_its_life():
    record = RequestState(REQUEST, 0, 100.0).finish_event("cancelled", 125.0).record
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (25.0, None, 25.0)
