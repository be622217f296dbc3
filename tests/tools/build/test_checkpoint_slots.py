"""tools/build/checkpoint_slots.py: slots for states of prefixes are beside those of requests, counted, and only where there are states."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.tools.build.plan import Options, plan


@pytest.mark.parametrize(("asked", "count"), [(None, 6), (0, 0), (9, 9)])
def test_requests_keep_theirs_and_the_plan_counts_the_others(tiny_checkpoint, asked, count):
    planned = tiny.planned(tiny_checkpoint, max_num_seqs=6, checkpoint_slots=asked)
    assert (planned.limits.num_request_slots, planned.limits.num_slots, planned.limits.checkpoint_slots) == (7, 25 + count, count)
    without = tiny.planned(tiny_checkpoint, max_num_seqs=6, checkpoint_slots=0)
    slot_bytes = (without.state_bytes - tiny.planned(tiny_checkpoint, max_num_seqs=5, checkpoint_slots=0).state_bytes) // 4
    assert count == 0 or 0 < planned.state_bytes - without.state_bytes < count * slot_bytes
    said = [asked] if asked is not None and asked != 6 else []
    arguments = planned.arguments
    assert [int(arguments[i + 1]) for i, word in enumerate(arguments) if word == "--checkpoint-slots"] == said


def test_a_model_without_states_has_no_use_for_them():
    assert plan(Options("qwen3-30b-a3b", backend="null")).limits.checkpoint_slots == 0
    with pytest.raises(SpecError, match=r"--checkpoint-slots 4: qwen3-30b-a3b has no recurrent states.*legal is 0"):
        plan(Options("qwen3-30b-a3b", backend="null", checkpoint_slots=4))


@pytest.mark.parametrize(("row", "count"), [("in64k-out1k-prefix90-50ms", 4), ("in64k-out1k-50ms", 0)])
def test_a_deployment_keeps_states_where_its_prompts_share_a_prefix(row, count):
    limits = plan(Options("qwen3.5-397b", deployment=f"qwen35-397b-a3x8-{row}")).limits
    assert limits.checkpoint_slots == count
    assert limits.num_slots == 1 + (limits.num_request_slots - 1) * limits.slots_per_request + count
