"""runtime/scheduler/request_state.py: how the state of a request advances, and the record it leaves."""

from __future__ import annotations

from npucompile.runtime.request import ExecutionRecord, Request
from npucompile.runtime.scheduler.request_state import RequestState

REQUEST = Request("r", (10, 11, 12), max_tokens=3, stop_token_ids=frozenset({7}))


def test_accepted_drafts_are_recorded_by_place():
    live = RequestState(REQUEST, 0, 0.0, num_computed_tokens=3, decoding=True, record=ExecutionRecord(accepted_per_position=(0, 0, 0)))
    for count, drafted in ((4, 3), (1, 3), (2, 2), (1, 0)):
        live = live.decode_launched(1, 0, 3).decode_committed("d", (1,) * count, count, drafted, 0)
    record = live.finish_event("length", 1.0).record
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position) == (3, 8, (2, 1, 1))
    assert (live.num_computed_tokens, live.steps_in_flight) == (11, 0)
    # Where the output ends inside a block, the record still has what the device accepted.
    cut = live.decode_launched(1, 0, 3).decode_committed("d", (1,), 3, 3, 0)
    assert (cut.record.accepted_per_position, len(cut.output_token_ids) - len(live.output_token_ids), cut.num_computed_tokens) == (
        (3, 2, 1),
        1,
        14,
    )
