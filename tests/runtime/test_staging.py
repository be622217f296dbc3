"""runtime/staging.py: arrays keep their values through one packed copy, and memory that a copy still reads is not overwritten."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.types import Aval, Bucket
from npucompile.runtime.staging import ALIGNMENT, InputBuffer, OutputBuffers, PackedLayout

SMALL, LARGE = Bucket("decode", 1, 1), Bucket("decode", 4, 1)
DTYPES = (torch.int32, torch.float32, torch.bfloat16, torch.uint8)


class Queue:
    """A device on the CPU that copies when the test lets it, as a stream does."""

    def __init__(self):
        self.waited, self.limits, self.pins = [], set(), 0

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, nbytes):
        self.pins += 1
        return torch.zeros(nbytes, dtype=torch.uint8)

    def record(self):
        return Recorded(self, len(self.waited))


class Recorded:
    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def wait(self, timeout_s=None):
        self.queue.waited.append(self.number)
        self.queue.limits.add(timeout_s)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6))
def test_views_are_aligned_disjoint_and_of_their_shape(specs):
    layout = PackedLayout.of({f"a{i}": Aval(tuple(shape), dtype) for i, (shape, dtype) in enumerate(specs)})
    buffer = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8)
    views = layout.views(buffer)
    for number, (name, view) in enumerate(views.items(), start=1):
        assert (tuple(view.shape), view.dtype) == (layout.avals[name].shape, layout.avals[name].dtype)
        assert layout.offsets[name] % ALIGNMENT == 0
        view.fill_(number)
    for number, view in enumerate(views.values(), start=1):
        assert (view == number).all()


def arrays(value, batch):
    return {"tokens": np.full((batch, 2), value, np.int32), "uniform": np.full((batch,), value / 8, np.float32)}


def layouts():
    return {
        b: PackedLayout.of({"tokens": Aval((b.batch, 2), torch.int32), "uniform": Aval((b.batch,), torch.float32)}) for b in (SMALL, LARGE)
    }


def test_inputs_of_all_buckets_arrive_in_one_buffer():
    queue = Queue()
    inputs = InputBuffer(queue, layouts(), ahead=1)
    for value, bucket in enumerate((SMALL, LARGE, SMALL, LARGE), start=1):
        inputs.send(bucket, arrays(value, bucket.batch))
        for name, array in arrays(value, bucket.batch).items():
            assert inputs.arrays[bucket][name].numpy().tolist() == array.tolist()
    places = {name: {inputs.arrays[bucket][name].data_ptr() for bucket in (SMALL, LARGE)} for name in ("tokens", "uniform")}
    assert len(places["tokens"]) == 1
    assert queue.pins == 2


def test_rows_that_a_step_leaves_out_at_the_end_are_not_copied():
    """Of the array that lies last, whatever its place among the graph's inputs."""
    queue = Queue()
    avals = {"tables": Aval((3, 4), torch.float32), "masks": Aval((4, 8), torch.int32), "tokens": Aval((2,), torch.int32)}
    layout = PackedLayout.of(avals, last=("masks", "tables"))
    inputs = InputBuffer(queue, {SMALL: layout}, ahead=0)
    assert list(inputs.arrays[SMALL]) == list(avals)
    assert layout.offsets["tables"] > layout.offsets["masks"] > layout.offsets["tokens"]
    for rows, tables, value in ((4, 0, 1), (1, 0, 2), (0, 0, 3), (0, 2, 4), (0, 0, 5)):
        masks, table = np.full((rows, 8), value, np.int32), np.full((tables, 4), value, np.float32)
        inputs.send(SMALL, {"masks": masks, "tables": table, "tokens": np.full((2,), value, np.int32)})
        if not tables:
            # What lies behind stays as it is, and what lies before the last one goes with it.
            copied = inputs.arrays[SMALL]["masks"].tolist()
    assert inputs.arrays[SMALL]["tokens"].tolist() == [5, 5]
    assert copied == [[2] * 8, *[[1] * 8] * 3]
    assert inputs.arrays[SMALL]["tables"].tolist() == [[4.0] * 4] * 2 + [[0.0] * 4]


def test_a_step_of_padding_fills_every_input():
    """What a compiler may run before the first step is legal: memory of zeros holds a top_p of 0."""
    inputs = InputBuffer(Queue(), layouts(), ahead=1)
    inputs.send(LARGE, arrays(3, 4))
    inputs.pad(LARGE, {"uniform": 1})
    assert (inputs.arrays[LARGE]["tokens"] == 0).all()
    assert (inputs.arrays[LARGE]["uniform"] == 1).all()


def test_host_memory_is_filled_again_only_after_the_copy_that_read_it():
    queue = Queue()
    inputs = InputBuffer(queue, layouts(), ahead=1, timeout_s=5)
    for value in range(4):
        inputs.send(SMALL, arrays(value, 1))
    assert len(queue.waited) == 2
    assert queue.limits == {5}


def test_a_missing_input_is_named():
    inputs = InputBuffer(Queue(), layouts(), ahead=1)
    with pytest.raises(KeyError, match="uniform"):
        inputs.send(SMALL, {"tokens": np.zeros((1, 2), np.int32)})


def test_outputs_of_two_steps_lie_apart():
    outputs = OutputBuffers(Queue(), layouts(), ahead=1)
    first = outputs.receive(LARGE, [torch.full((4, 2), 1, dtype=torch.int32), torch.full((4,), 0.5)])
    second = outputs.receive(SMALL, [torch.full((1, 2), 2, dtype=torch.int32), torch.full((1,), 0.25)])
    assert (first["tokens"] == 1).all()
    assert (second["tokens"] == 2).all()
    third = outputs.receive(LARGE, [torch.full((4, 2), 3, dtype=torch.int32), torch.full((4,), 0.5)])
    assert third["tokens"].data_ptr() == first["tokens"].data_ptr()
