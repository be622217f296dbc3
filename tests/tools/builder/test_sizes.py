"""tools/builder/sizes.py: sizes that are asked for, and those of a deployment; test_plan.py has their notes and refusals."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.plan import Options
from npucompile.tools.notation import PrefillSize

ROW = "qwen3-32b-a3x4-mix-6k-1.5k-18ms"


def planned(**options):
    plan = planning.plan(Options("qwen3-32b", backend="null", **options))
    return plan, [bucket.name.removeprefix("prefill-") for bucket in plan.buckets if bucket.kind == "prefill"]


def test_a_deployment_decides_what_is_not_asked_for() -> None:
    plan, prefill = planned(deployment=ROW)
    assert (plan.published, prefill) == (True, ["b1-q6016", "b5-q6016"])
    assert [bucket.batch for bucket in plan.buckets if bucket.kind == "decode"] == [8, 16, 24, 32]
    # Fewer requests or a shorter context than the row's make its steps smaller.
    few, prefill = planned(deployment=ROW, max_num_seqs=3, buckets=(3,), max_model_len=1024)
    assert (few.limits.num_pages, few.published, prefill) == (1 + 3 * 8, False, ["b1-q1024", "b3-q1024"])
    more, _ = planned(deployment=ROW, buckets=(64,))
    assert (more.limits.num_request_slots, more.published) == (65, True)


@pytest.mark.parametrize(("backend", "expected"), [("inductor", ["b1-q64"]), ("eager", ["b1-q32", "b1-q64"])])
def test_where_sizes_are_values_one_number_is_enough(tiny_checkpoint, backend, expected):
    plan = tiny.planned(tiny_checkpoint, backend=backend, prefill=None, max_model_len=64)
    assert [bucket.name.removeprefix("prefill-") for bucket in plan.buckets if bucket.kind == "prefill"] == expected


def test_prompts_beyond_the_context_or_the_requests_in_flight_are_left_out_or_refused() -> None:
    place = {"target": "ascend-a3", "mesh": "tp=8", "max_model_len": 1024, "buckets": (8,)}
    small, large, shared = PrefillSize(128), PrefillSize(4096), PrefillSize(512, 8)
    plan, prefill = planned(**place, prefill=(shared, small, large))
    assert prefill == ["b1-q128", "b8-q512"]
    assert "no prefill of 4096 tokens: longer than the context of 1024" in plan.notes
    with pytest.raises(SpecError, match="no prefill of 4096 tokens fits max_model_len 1024; legal are sizes from 1 to 1024"):
        planned(**place, prefill=(large,))
    with pytest.raises(SpecError, match="--prefill 520: each of --prefill-cp 8 ranks has two slices of a chunk; legal are multiples of 16"):
        planned(**place, prefill=(PrefillSize(512), PrefillSize(520)), prefill_cp=8)
    with pytest.raises(SpecError, match="--prefill 9x64 takes 9 prompts a step, and 8 requests are in flight; legal are up to that"):
        planned(**place, prefill=(PrefillSize(64, 9),))


def test_prompts_are_scored_in_steps_of_sizes_that_are_asked_for() -> None:
    place = {"target": "ascend-a3", "mesh": "tp=8", "buckets": (8,), "prefill": (PrefillSize(128),), "max_logprobs": 2}
    plan, prefill = planned(**place, score=(PrefillSize(64, 2), PrefillSize(256)))
    assert ([bucket.name for bucket in plan.buckets if bucket.kind == "score"], prefill) == (["score-b1-q256", "score-b2-q64"], ["b1-q128"])
    assert plan.arguments[plan.arguments.index("--score") + 1] == "256,2x64"
    assert not [bucket for bucket in planned(**place)[0].buckets if bucket.kind == "score"]
    assert planned(**place | {"max_logprobs": None}, score=(PrefillSize(64),))[0].max_logprobs == 20
    with pytest.raises(SpecError, match="--score 9x64 takes 9 prompts a step"):
        planned(**place, score=(PrefillSize(64, 9),))
    with pytest.raises(SpecError, match="--score 64 and --max-logprobs 0; legal is one of both"):
        planned(**place | {"max_logprobs": 0}, score=(PrefillSize(64),))
    options = Options(
        "qwen3.5-397b", deployment="qwen35-397b-a3x24-pd-1p1d-3node", phase="prefill", score=(PrefillSize(64),), max_logprobs=1
    )
    with pytest.raises(SpecError, match="--score 64 and phase prefill; legal is one of both"):
        planning.plan(options)


def test_cached_tokens_are_bounded_in_whole_pages_that_hold_a_request(tiny_checkpoint):
    free = tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64).limits
    assert (free.num_pages - 1) * free.page_size == 4 * 64
    for tokens, pages in ((64, 4), (100, 6), (256, 16), (10_000, 16)):
        plan = tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64, max_total_tokens=tokens)
        assert plan.limits.num_pages - 1 == pages
        assert plan.arguments[plan.arguments.index("--max-total-tokens") + 1] == str(tokens)
    with pytest.raises(SpecError, match=r"--max-total-tokens 63: one request may have 64 tokens; legal is at least that many"):
        tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64, max_total_tokens=63)


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
    assert planning.plan(Options("qwen3-30b-a3b", backend="null")).limits.checkpoint_slots == 0
    with pytest.raises(SpecError, match=r"--checkpoint-slots 4: qwen3-30b-a3b has no recurrent states.*legal is 0"):
        planning.plan(Options("qwen3-30b-a3b", backend="null", checkpoint_slots=4))


@pytest.mark.parametrize(("row", "count"), [("in64k-out1k-prefix90-50ms", 4), ("in64k-out1k-50ms", 0)])
def test_a_deployment_keeps_states_where_its_prompts_share_a_prefix(row, count):
    limits = planning.plan(Options("qwen3.5-397b", deployment=f"qwen35-397b-a3x8-{row}")).limits
    assert limits.checkpoint_slots == count
    assert limits.num_slots == 1 + (limits.num_request_slots - 1) * limits.slots_per_request + count
