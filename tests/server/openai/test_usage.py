"""server/openai/usage.py: a prompt counts once, its completions each."""

from __future__ import annotations

import pytest
from support.texts import RECORD

from npucompile.server.engine.output_stream import Usage
from npucompile.server.openai.usage import usage_object


def usage(prompt, output, cached, drafted, accepted):
    return Usage(prompt, output, RECORD._replace(cached_tokens=cached, drafted_tokens=drafted, accepted_per_position=accepted))


def test_usage_adds_up():
    of_first = [usage(10, 3, 8, 6, (1, 1, 0)), usage(10, 4, 6, 0, (0, 0, 0))]
    of_second = [usage(5, 1, 0, 3, (1, 0, 0)), usage(5, 1, 2, 0, ())]
    assert usage_object([*of_first, *of_second], n=2) == {
        "prompt_tokens": 15,
        "completion_tokens": 9,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6},
    }


@pytest.mark.parametrize(("output", "accepted"), [(0, 0), (1, 1), (5, 3)])
def test_no_more_predictions_are_accepted_than_there_are_tokens(output, accepted):
    details = usage_object([usage(10, output, 0, 6, (2, 1, 0))])["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 6 - accepted}
