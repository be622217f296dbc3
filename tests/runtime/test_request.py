"""runtime/request.py: an illegal value is refused with the legal ones, and never replaced by a default."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import ExecutionRecord, Sampling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1},
        {"temperature": 0.0, "top_k": 0, "top_p": 1e-9, "min_p": 0.0},
        {"seed": 0},
        {"seed": -(2**70)},
    ],
)
def test_what_is_legal_is_kept(fields):
    sampling = Sampling(**fields)
    assert {name: getattr(sampling, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature is -0\.1; legal is a number from 0\.0 to 100\.0"),
        ("temperature", 100.1, "temperature is 100.1"),
        ("temperature", NAN, "temperature is nan"),
        ("temperature", INF, "temperature is inf"),
        ("temperature", True, "temperature is True"),
        ("temperature", "1", "temperature is '1'"),
        ("temperature", None, "temperature is None"),
        ("top_k", -1, "top_k is -1; legal is a whole number from 0 to 2147483647"),
        ("top_k", 2**31, "top_k is 2147483648"),
        ("top_k", 2.5, r"top_k is 2\.5; legal is a whole number"),
        ("top_k", True, "top_k is True"),
        ("top_p", 0.0, "top_p is 0; legal is above 0 up to 1"),
        ("top_p", 1.1, r"top_p is 1\.1; legal is a number from 0\.0 to 1\.0"),
        ("top_p", NAN, "top_p is nan"),
        ("min_p", -0.5, r"min_p is -0\.5"),
        ("min_p", 2, "min_p is 2"),
        ("seed", 1.0, r"seed is 1\.0; legal is an integer or null"),
        ("seed", True, "seed is True"),
        ("seed", "7", "seed is '7'"),
    ],
)
def test_what_is_not_is_refused_by_its_field(field, value, message):
    with pytest.raises(RequestError, match=message) as refused:
        Sampling(**{field: value})
    assert refused.value.param == field
    assert refused.value.code == "invalid_request_error"


@pytest.mark.parametrize(
    ("steps", "accepted", "length"),
    [(0, (0, 0, 0), None), (4, (0, 0, 0), 1.0), (4, (4, 4, 4), 4.0), (2, (2, 1, 0), 2.5), (0, (), None)],
)
def test_acceptance_length_is_tokens_for_each_step_with_drafts(steps, accepted, length):
    record = ExecutionRecord(0.0, None, 1.0, (), (), 0, 0, verify_steps=steps, accepted_per_position=accepted)
    assert record.acceptance_length == length
