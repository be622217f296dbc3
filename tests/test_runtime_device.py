"""runtime/device.py: one call for executors of one group and of several."""

from __future__ import annotations

from npucompile.graphs.types import Bucket
from npucompile.runtime.device import group_count, run_step

BUCKET = Bucket("decode", 1, 1)


class One:
    limits = vocab_size = None
    buckets = (BUCKET,)

    def run(self, bucket, inputs):
        return {"tokens": (bucket.name, inputs)}

    def refresh(self):
        return False

    def compiles(self):
        return 0


class Many(One):
    groups = 3

    def run_groups(self, bucket, inputs):
        return [self.run(bucket, one) for one in reversed(inputs)]


def test_one_group():
    assert group_count(One()) == 1
    assert run_step(One(), BUCKET, ["a"]) == [{"tokens": (BUCKET.name, "a")}]


def test_several_groups():
    assert group_count(Many()) == 3
    assert [out["tokens"][1] for out in run_step(Many(), BUCKET, ["a", "b", "c"])] == ["c", "b", "a"]
