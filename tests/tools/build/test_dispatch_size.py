"""tools/build/dispatch_size.py: parts of prefill are as large as a rank's memory allows, and the plan says where they are smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.models.variant import MOST_DISPATCHED
from npucompile.tools.build import plan as planning
from npucompile.tools.build.dispatch_size import FEWER_DISPATCHED, fit_dispatch

BIG = "qwen3.5-397b"


@pytest.fixture(scope="module")
def plan():
    return planning.plan(planning.Options(BIG))


def most_dispatched(plan):
    return plan.model.config.variant.most_dispatched


def with_less_memory(plan):
    target, less = plan.target, 10 * 2**30
    npu = replace(target.npu, hbm_bytes=target.npu.hbm_bytes - less, usable_hbm_bytes=target.npu.usable_hbm_bytes - less)
    return replace(plan, target=replace(target, npu=npu))


def test_the_default_deployment_has_windows_for_the_largest_parts(plan):
    assert most_dispatched(plan) == MOST_DISPATCHED
    assert max(bucket.tokens for bucket in plan.buckets) // plan.mesh.axis("tp") > MOST_DISPATCHED
    assert not [note for note in plan.notes if "at once" in note]


def test_less_memory_takes_smaller_parts_and_says_so(plan):
    smaller = fit_dispatch(with_less_memory(plan))
    assert most_dispatched(smaller) == FEWER_DISPATCHED
    assert [note for note in smaller.notes if note.startswith(f"experts get at most {FEWER_DISPATCHED} tokens of a rank at once")]


def test_windows_depend_on_the_tokens_that_there_are(plan):
    decode = tuple(bucket for bucket in plan.buckets if bucket.kind == "decode")
    tight = replace(with_less_memory(plan), buckets=decode)
    assert fit_dispatch(tight) == tight
