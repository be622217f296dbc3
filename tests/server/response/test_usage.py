"""server/response/usage.py: usage in OpenAI's shape, for one completion and for several."""

from __future__ import annotations

from npucompile.runtime.request import ExecutionRecord
from npucompile.server.engine.output_stream import Usage
from npucompile.server.response.usage import usage_object

RECORD = ExecutionRecord(
    1.5,
    2.5,
    9.0,
    ("prefill-b1-q32",),
    (("decode-b2-q4", 3),),
    padded_rows=3,
    preemptions=0,
    cached_tokens=4,
    verify_steps=2,
    drafted_tokens=6,
    accepted_per_position=(2, 1, 0),
    cache_write_tokens=1,
)
RECORD_OBJECT = {
    "queue_ms": 1.5,
    "first_token_ms": 2.5,
    "total_ms": 9.0,
    "prefill_chunks": ["prefill-b1-q32"],
    "decode_steps": {"decode-b2-q4": 3},
    "padded_rows": 3,
    "preemptions": 0,
    "cached_tokens": 4,
    "verify_steps": 2,
    "drafted_tokens": 6,
    "accepted_per_position": [2, 1, 0],
    "cache_write_tokens": 1,
    "encoded_pictures": 0,
    "acceptance_length": 2.5,
}
PLAIN = ExecutionRecord(0.0, None, 1.0, (), (), 0, 0)
PLAIN_OBJECT = {
    "queue_ms": 0.0,
    "first_token_ms": None,
    "total_ms": 1.0,
    "prefill_chunks": [],
    "decode_steps": {},
    "padded_rows": 0,
    "preemptions": 0,
    "cached_tokens": 0,
    "verify_steps": 0,
    "drafted_tokens": 0,
    "accepted_per_position": [],
    "cache_write_tokens": 0,
    "encoded_pictures": 0,
    "acceptance_length": None,
}


def test_one_completion_has_openai_names_and_its_record_beside_them():
    assert usage_object([Usage(5, 3, RECORD)]) == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
        "npucompile": RECORD_OBJECT,
    }


def test_several_share_the_input_and_list_their_records():
    assert usage_object([Usage(5, 3, RECORD), Usage(5, 7, PLAIN)]) == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 1},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
        "npucompile": {"completions": [{"output_tokens": 3, **RECORD_OBJECT}, {"output_tokens": 7, **PLAIN_OBJECT}]},
    }


def test_nothing_of_the_record_is_left_out():
    record = usage_object([Usage(5, 3, RECORD)])["npucompile"]
    assert set(record) == {*ExecutionRecord._fields} | {"acceptance_length"}
