"""runtime/scheduler/batch_inputs.py: the next inputs of a batch are those that packing its rows anew gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import all_decode, batch_tokens, policy, request

from npucompile.graphs.types import Bucket
from npucompile.runtime.buckets import Arrays, DecodeRow, pack
from npucompile.runtime.request import Sampling
from npucompile.runtime.rng import random_number
from npucompile.runtime.scheduler.advance import commit, launch
from npucompile.runtime.scheduler.batch_inputs import BatchInputs
from npucompile.runtime.scheduler.decode_batch import DecodeBatch
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import DecodeRows
from npucompile.runtime.scheduler.steady import gathered

RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=4, page_size=2, length=60, drafts=2)
BUCKET = Bucket("decode", 4, 3)


def packed(rows: DecodeRows) -> Arrays:
    """The inputs of rows whose pages and slots have numbers that follow from the row's."""
    found = []
    for i, row in enumerate(rows):
        sampling = row.request.sampling
        uniforms = [random_number(sampling.seed or 0, row.output_index + j) for j in range(5)] if sampling.temperature else ()
        found.append(DecodeRow(i + 1, row.start, pages_of(i, row.num_pages), range(i, i + 3), row.num_drafts, sampling, uniforms))
    return pack(BUCKET, found, RULES.limits)


def pages_of(i: int, count: int) -> range:
    return range(40 * i + 1, 40 * i + 1 + count)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5]), st.integers(-(2**70), 2**70)), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, 3), min_size=3, max_size=3), min_size=1, max_size=5),
    st.booleans(),
)
def test_the_next_inputs_are_those_of_all_rows(kinds: list[tuple[float, int]], steps: list[list[int]], ahead: bool) -> None:
    samplings = [Sampling(temperature, seed=seed) for temperature, seed in kinds]
    requests = [replace(request(f"r{i}", prompt=3 + i, max_tokens=50), sampling=sampling) for i, sampling in enumerate(samplings)]
    state, inputs, kept = gathered(all_decode(RULES, *requests)), None, []
    for number, counts in enumerate(steps):
        step = schedule(state)
        assert step is not None
        rows = step.groups[0].rows
        assert isinstance(rows, DecodeRows)
        expected = packed(rows)
        if inputs is None:
            inputs = BatchInputs(BUCKET, rows, expected)
        grown = np.flatnonzero(rows.num_pages > rows.batch.progress.num_pages).tolist()
        assert rows.grown == grown
        assert inputs.are_of(BUCKET, rows)
        assert not inputs.are_of(Bucket("decode", 8, 3), rows)
        kept.append((inputs.next(rows, [(i, pages_of(i, int(rows.num_pages[i]))) for i in grown]), expected))
        state = launch(state, step, 0.0)
        if ahead and number == 0:
            continue
        batch = state.groups[0].running
        assert isinstance(batch, DecodeBatch)
        state, _ = commit(state, step, [batch_tokens(batch, [(1,) * count for count in counts[: len(kinds)]])], 0.0)
    # At the end, because no step may change what another one got.
    for found, arrays in kept:
        assert list(found) == list(arrays)
        for name, array in found.items():
            assert (array.dtype, array.tolist()) == (arrays[name].dtype, arrays[name].tolist()), name
