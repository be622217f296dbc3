"""runtime/executor.py: steps that an executor cannot run are refused."""

from __future__ import annotations

import pytest
from support import toy_device

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket
from npucompile.runtime.executor import check_step

DEVICE = toy_device.ToyDevice(toy_device.limits_of(4, 9, 1, 32), (Bucket("decode", 2, 1), Bucket("prefill", 1, 8)), groups=2)


def test_a_step_has_one_of_the_buckets_and_inputs_for_every_group():
    check_step(DEVICE, DEVICE.buckets[0], [{}, {}])
    with pytest.raises(SpecError, match="no bucket decode-b9-q1; the artifact has decode-b2-q1, prefill-b1-q8"):
        check_step(DEVICE, Bucket("decode", 9, 1), [{}, {}])
    with pytest.raises(SpecError, match="inputs for 1 dp groups; the executor has 2"):
        check_step(DEVICE, DEVICE.buckets[0], [{}])
