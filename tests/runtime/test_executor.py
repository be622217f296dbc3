"""runtime/executor.py: steps that an executor cannot run are refused; what encode buckets take is read from their graphs."""

from __future__ import annotations

import pytest
import torch
from support import toy_device

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.types import Aval, Bucket, Leaf
from npucompile.runtime.executor import check_step, segment_sizes

DEVICE = toy_device.ToyDevice(toy_device.limits_of(4, 9, 1, 32), (Bucket("decode", 2, 1), Bucket("prefill", 1, 8)), groups=2)


def test_a_step_has_one_of_the_buckets_and_inputs_for_every_group():
    check_step(DEVICE, DEVICE.buckets[0], [{}, {}])
    with pytest.raises(SpecError, match="no bucket decode-b9-q1; the artifact has decode-b2-q1, prefill-b1-q8"):
        check_step(DEVICE, Bucket("decode", 9, 1), [{}, {}])
    with pytest.raises(SpecError, match="inputs for 1 dp groups; the executor has 2"):
        check_step(DEVICE, DEVICE.buckets[0], [{}])


def test_sizes_are_those_of_the_graphs() -> None:
    class Entry:
        bucket = Bucket("encode", 3, 16)
        inputs = tuple(
            Leaf(f"inputs.{name}", Aval(shape, dtype))
            for name, shape, dtype in [("patches", (3, 16, 24), torch.uint8), ("picture_rows", (3, 4), torch.int32)]
        )

    class Text:
        bucket = Bucket("decode", 1, 1)

    class Manifest:
        graphs = (Text, Entry)

    assert segment_sizes(Manifest) == SegmentSizes(24, 4)  # type: ignore[arg-type]
    Manifest.graphs = (Text,)  # type: ignore[assignment]
    assert segment_sizes(Manifest) is None  # type: ignore[arg-type]
