"""runtime/executor.py: one way to start a step, whatever kind of executor runs it."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Bucket
from npucompile.runtime.executor import group_count, launcher, most_logprobs, most_run_ahead, run_step

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


class Launching(One):
    run_ahead, max_logprobs = 1, 20

    def launch(self, bucket, inputs):
        return ("launched", bucket, inputs)


def test_one_group():
    assert group_count(One()) == 1
    assert run_step(One(), BUCKET, ["a"]) == [{"tokens": (BUCKET.name, "a")}]


def test_several_groups():
    assert group_count(Many()) == 3
    assert [out["tokens"][1] for out in run_step(Many(), BUCKET, ["a", "b", "c"])] == ["c", "b", "a"]


def test_what_can_start_steps_does():
    assert launcher(Launching())(BUCKET, ["a"]) == ("launched", BUCKET, ["a"])
    assert (most_run_ahead(Launching()), most_logprobs(Launching())) == (1, 20)


@pytest.mark.parametrize("kind, inputs", [(One, ["a"]), (Many, ["a", "b", "c"])])
def test_what_cannot_has_run_when_it_is_launched(kind, inputs):
    executor, ran = kind(), []
    executor.run = lambda bucket, one: ran.append(one) or {"tokens": one}
    pending = launcher(executor)(BUCKET, inputs)
    assert sorted(ran) == inputs
    assert sorted(out["tokens"] for out in pending.result()) == inputs
    assert len(ran) == len(inputs)
    assert (most_run_ahead(executor), most_logprobs(executor)) == (0, 0)


def test_what_makes_a_step_fail_is_raised_where_it_runs():
    def fail(bucket, inputs):
        raise ZeroDivisionError("no")

    executor = One()
    executor.run = fail
    with pytest.raises(ZeroDivisionError):
        launcher(executor)(BUCKET, ["a"])
