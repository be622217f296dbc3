"""runtime/scheduler/request_state.py: how the state of a request advances, and the record it leaves."""

from __future__ import annotations

from npucompile.runtime.request import DecodedRow, ExecutionRecord, Request
from npucompile.runtime.scheduler.request_state import RequestState

REQUEST = Request("r", (10, 11, 12), max_tokens=3, stop_token_ids=frozenset({7}))


def test_accepted_drafts_are_recorded_by_place():
    live = RequestState(REQUEST, 0, 0.0, num_computed_tokens=3, decoding=True, record=ExecutionRecord(accepted_per_position=(0, 0, 0)))
    for count, drafted in ((4, 3), (1, 3), (2, 2), (1, 0)):
        live = live.decode_launched(1, 0, 3).decode_committed(DecodedRow("d", 0, drafted, count - 1), (1,) * count)
    record = live.finish_event("length", 1.0).record
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position) == (3, 8, (2, 1, 1))
    assert (live.num_computed_tokens, live.steps_in_flight) == (11, 0)
    # Where the output ends inside a block, the record still has what the device accepted.
    cut = live.decode_launched(1, 0, 3).decode_committed(DecodedRow("d", 0, 3, 2), (1,))
    assert (
        cut.finish_event("length", 1.0).record.accepted_per_position,
        len(cut.output_token_ids) - len(live.output_token_ids),
        cut.num_computed_tokens,
    ) == (
        (3, 2, 1),
        1,
        14,
    )


def test_a_decode_step_changes_its_own_fields_and_no_other():
    record = ExecutionRecord(*(float(place) for place in range(3)), ("p",), (("d", 2), ("e", 1)), 5, 6, 7, 8, 9, (4, 4, 4), 11, 12)
    live = RequestState(REQUEST, 1, 2.0, record, (5,), 3, (1, 2), 4, 5, 6, 7, True, 8.0, True, (9,), 0, False, (10,))
    launched = live.decode_launched(20, 21, 22)
    assert launched == live._replace(steps_in_flight=5, num_pages=20, last_scheduled=21, drafted=22)
    committed = live.decode_committed(DecodedRow("e", 3, 3, 2), (8, 9), (30,))
    assert committed == live._replace(output_token_ids=(5, 8, 9), num_computed_tokens=6, drafts=(30,), steps_in_flight=3)
    # The row is in the record at the end, whatever was committed to other states before.
    assert live.decode_committed(DecodedRow("f", 9, 9, 0), (1,)) != committed
    counted = {"decode_steps": (("d", 2), ("e", 2)), "padded_rows": 8, "verify_steps": 9, "drafted_tokens": 12}
    ended = committed.finish_event("length", 10.0).record
    assert ended == record._replace(**counted, accepted_per_position=(5, 5, 4), queue_ms=6.0, total_ms=8.0)
