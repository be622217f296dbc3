"""runtime/step_outputs.py: outputs become what each request got, and nonsense is told from what nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest

from npucompile.graphs.errors import NpucompileError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request, TokenLogprobs
from npucompile.runtime.scheduler.request_state import Live
from npucompile.runtime.scheduler.schedule import Policy, State, Step, Turn
from npucompile.runtime.step_outputs import Sampled, read

VOCAB = 13
DECODE, PREFILL = Bucket("decode", 3, 3), Bucket("prefill", 2, 4)
RULES = Policy(Limits(4, 33, 13, 16, 3, 2), (DECODE, PREFILL))


def i32(values):
    return np.array(values, np.int32)


def turn(arrival, *, drafts=2, logprobs=None, next_token=-1):
    request = Request(f"r{arrival}", (1, 2), 9, logprobs=logprobs)
    return Turn(request, arrival, 4, 0, 0, drafts=drafts, next_token=next_token)


def state(*turns, computed=5):
    """The requests of these turns, decoding from position 5 on."""
    return State(RULES, running=tuple(Live(one.request, one.arrival, 0.0, computed=computed, decoding=True) for one in turns))


def decoded(tokens=((1, 2, 3), (4, -7, -7), (-7, -7, -7)), counts=(3, 1, 0), **others):
    return {"tokens": i32(tokens), "counts": i32(counts), **others}


def test_as_many_tokens_as_count():
    turns = (turn(4), turn(2, drafts=0))
    assert read(decoded(), Step(DECODE, turns), state(*turns), VOCAB) == (Sampled((1, 2, 3), 2), Sampled((4,), 0))


def test_a_prefill_gives_one_token_after_its_last_chunk_only():
    turns = (turn(0), turn(1, next_token=5))
    outputs = {"tokens": i32([[9], [-7]])}
    assert read(outputs, Step(PREFILL, turns), state(*turns), VOCAB) == (Sampled((9,)), Sampled(()))


def test_whatever_is_said_of_a_request_that_has_ended_is_not_read():
    turns = (turn(0), turn(1))
    outputs = decoded([[-1, 99, 0], [4, 5, 6], [0, 0, 0]], [77, 2, 0])
    assert read(outputs, Step(DECODE, turns), state(turns[1]), VOCAB) == (None, Sampled((4, 5), 2))


@pytest.mark.parametrize("start, drafted", [(13, 2), (14, 1), (15, 0)])
def test_no_draft_beyond_the_longest_context_is_verified(start, drafted):
    turns = (turn(0),)
    (got,) = read(decoded(counts=(1, 0, 0)), Step(DECODE, turns), state(*turns, computed=start), VOCAB)
    assert got.drafted == drafted
    with pytest.raises(
        NpucompileError, match=rf"{drafted + 2} tokens count for 'r0', of which {drafted} drafts .* legal is 1 to {drafted + 1}"
    ):
        read(decoded(counts=(drafted + 2, 0, 0)), Step(DECODE, turns), state(*turns, computed=start), VOCAB)


def test_log_probabilities_of_whom_asked():
    turns = (turn(0, logprobs=2), turn(1), turn(2, logprobs=0))
    outputs = decoded(
        [[1, 2, -7], [3, -7, -7], [4, 5, 6]],
        [2, 1, 3],
        chosen_logprobs=np.array([[-0.5, -1.5, np.nan], [np.nan] * 3, [-1.0, -2.0, -3.0]], np.float32),
        top_ids=i32([[[7, 8, 9], [6, 5, 4], [0, 0, 0]]] + [[[0] * 3] * 3] * 2),
        top_logprobs=np.array([[[-0.25, -0.5, -1], [-1, -2, -3], [0, 0, 0]]] + [[[0] * 3] * 3] * 2, np.float32),
    )
    found = read(outputs, Step(DECODE, turns), state(*turns), VOCAB)
    assert found[0].logprobs == (TokenLogprobs(-0.5, ((7, -0.25), (8, -0.5))), TokenLogprobs(-1.5, ((6, -1.0), (5, -2.0))))
    assert found[1].logprobs == ()
    assert found[2].logprobs == tuple(TokenLogprobs(-float(i), ()) for i in (1, 2, 3))
    assert all(type(value) is float and type(token) is int for token, value in found[0].logprobs[0].top)


@pytest.mark.parametrize(
    "outputs, message",
    [
        ({"counts": i32([1, 1, 0])}, "returned no tokens; it returned counts"),
        ({"tokens": i32([[1] * 3] * 3)}, "returned no counts; it returned tokens"),
        (decoded([[1] * 2] * 3), r"returned tokens int32\[3, 2\]; legal is int32\[3, 3\]"),
        (decoded([1, 2, 3]), r"returned tokens int32\[3\]; legal is int32\[3, 3\]"),
        (decoded() | {"tokens": np.zeros((3, 3), np.float32)}, r"returned tokens float32\[3, 3\]"),
        (decoded(counts=(1, 1)), r"returned counts int32\[2\]; legal is int32\[3\]"),
        (decoded(counts=(0, 1, 0)), "0 tokens count for 'r0'"),
        (decoded(counts=(4, 1, 0)), "4 tokens count for 'r0', of which 2 drafts were verified; legal is 1 to 3"),
        (decoded(counts=(1, 3, 0)), "3 tokens count for 'r1', of which 1 drafts were verified; legal is 1 to 2"),
        (decoded([[1, 13, 0], [1] * 3, [1] * 3], (2, 1, 0)), r"returned token ids \[1, 13\] for 'r0'; legal is 0 to 12"),
        (decoded([[1, 2, 3], [-1] * 3, [1] * 3]), r"returned token ids \[-1\] for 'r1'"),
        (decoded(), "returned no chosen_logprobs; it returned tokens, counts"),
        (
            decoded(chosen_logprobs=np.zeros((3, 3), np.float32), top_ids=i32(np.zeros((3, 2, 4)))),
            r"returned top_ids int32\[3, 2, 4\]; legal is int32\[3, 3, n\]",
        ),
        (
            decoded(chosen_logprobs=np.zeros((3, 3), np.float32), top_ids=i32(np.zeros((3, 3, 1))), top_logprobs=i32(np.zeros((3, 3, 1)))),
            r"returned top_logprobs int32\[3, 3, 1\]; legal is float32\[3, 3, n\]",
        ),
    ],
)
def test_nonsense_is_told(outputs, message):
    turns = (turn(0), turn(1, drafts=1, logprobs=1))
    with pytest.raises(NpucompileError, match=message):
        read(outputs, Step(DECODE, turns), state(*turns), VOCAB)
