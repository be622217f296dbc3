"""tools/offline.py: prompts in, completions out, batched as a server would."""

from __future__ import annotations

import numpy as np
import pytest

from npucompile.graphs.errors import NpucompileError, RequestError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact import Artifact
from npucompile.runtime.buckets import Row, pack
from npucompile.runtime.executor import Executor
from npucompile.runtime.request import ExecutionRecord, Sampling
from npucompile.tools.offline import Completion, complete

GREEDY, NO_STOP = Sampling(), frozenset()


@pytest.fixture(scope="module")
def executor(tiny_artifact):
    return Executor(Artifact.open(tiny_artifact))


def by_hand(executor, prompt, count):
    """Greedy decoding with nothing between it and the graphs."""
    pages = [1, 2, 3, 4]

    def run(bucket, tokens, start):
        row = Row(tokens, start, pages, 1, [1], GREEDY, [])
        return int(executor.run(bucket, pack(bucket, [row], executor.limits))["tokens"][0, 0])

    start = 0
    for start in range(0, len(prompt), 16):
        token = run(Bucket("prefill", 1, 16), prompt[start : start + 16], start)
    made = [token]
    while len(made) < count:
        made.append(run(Bucket("decode", 1, 1), [made[-1]], len(prompt) + len(made) - 1))
    return tuple(made)


def test_completions_are_what_the_graphs_say(executor):
    prompts = [[1, 2, 3], [9] * 20, list(range(50)), [0], [255]]
    expected = [by_hand(executor, prompt, 6) for prompt in prompts]
    assert len(set(expected)) == 5
    found = complete(executor, prompts, GREEDY, 6, NO_STOP)
    assert [one.token_ids for one in found] == expected
    for one, prompt in zip(found, prompts, strict=True):
        assert (one.prompt_tokens, one.completion_tokens, one.reason) == (len(prompt), 6, "length")
        assert one.acceptance_length == 1.0
        assert one.record.prefill_chunks
    assert any(one.record.padded_rows or dict(one.record.decode_steps).get("decode-b4-q1") for one in found)


def test_a_stop_token_ends_the_output_and_is_not_in_it(executor):
    (free,) = complete(executor, [[1, 2, 3]], GREEDY, 8, NO_STOP)
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    (cut,) = complete(executor, [[1, 2, 3]], GREEDY, 8, frozenset({stop}))
    assert cut.token_ids == free.token_ids[:first]
    assert cut.reason == "stop"
    assert cut.completion_tokens == first + 1


def test_the_context_ends_what_max_tokens_does_not(executor):
    (one,) = complete(executor, [[5] * 60], GREEDY, 100, NO_STOP)
    assert (len(one.token_ids), one.reason) == (4, "length")


def test_a_seed_repeats_and_another_does_not(executor):
    def tokens(seed):
        return [one.token_ids for one in complete(executor, [[1, 2], [3]], Sampling(1.5, seed=seed), 12, NO_STOP)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_prompt_that_can_never_be_served_is_refused(executor):
    with pytest.raises(RequestError, match="the prompt has 64 tokens; legal is 1 to 63"):
        complete(executor, [[1], [1] * 64], GREEDY, 4, NO_STOP)
    with pytest.raises(RequestError, match="prompt has token id 260; legal is an integer from 0 to 259"):
        complete(executor, [[260]], GREEDY, 4, NO_STOP)


def test_a_step_that_fails_is_told(tiny, executor, caplog):
    class Broken(tiny.Narrowed):
        def run(self, bucket, inputs):
            raise ZeroDivisionError("no")

    with pytest.raises(NpucompileError, match="generation failed: prefill-b1-q4: ZeroDivisionError: no"):
        complete(Broken(executor, executor.buckets), [[1]], GREEDY, 4, NO_STOP)


@pytest.mark.parametrize(("completed", "steps", "length"), [(1, (), 1.0), (7, (("a", 2), ("b", 1)), 2.0), (9, (("a", 4),), 2.0)])
def test_acceptance_length_counts_decode_steps_of_any_bucket(completed, steps, length):
    record = ExecutionRecord(0.0, 1.0, 2.0, (), steps, 0, 0)
    assert Completion(3, (), completed, "length", record).acceptance_length == length


def test_outputs_are_plain_numbers(executor):
    (one,) = complete(executor, [np.array([1, 2], np.int32).tolist()], GREEDY, 2, NO_STOP)
    assert all(type(token) is int for token in one.token_ids)
