"""tools/build/sizes.py: sizes that are asked for, and those of a deployment; test_plan.py has their notes and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.models import registry
from npucompile.tools.build.instance import Instance, resolve
from npucompile.tools.build.plan import Options
from npucompile.tools.build.sizes import decode_sizes, prefill_buckets
from npucompile.tools.notation import PrefillSize

ROW = "qwen3-32b-a3x4-mix-6k-1.5k-18ms"


def instance(**changes: str | None) -> Instance:
    options: dict[str, str | None] = dict.fromkeys(("backend", "deployment", "phase", "target_name", "mesh", "quantization"))
    return resolve("qwen3-32b", **{**options, **changes}, drafts=None, has_draft_head=False)  # type: ignore[arg-type]


def test_a_deployment_decides_what_is_not_asked_for() -> None:
    source, row = registry.find("qwen3-32b"), instance(deployment=ROW)
    batches, limits, published = decode_sizes(Options("qwen3-32b"), source, row)
    assert (batches, limits, published) == ([8, 16, 24, 32], row.limits, True)
    one, five = Bucket("prefill", 1, 6016), Bucket("prefill", 5, 6016)
    assert prefill_buckets(Options("qwen3-32b"), row, limits) == ((one, five), [])
    # Fewer requests or a shorter context than the row's make its steps smaller.
    few = replace(limits, num_slots=4, max_model_len=1024)
    assert prefill_buckets(Options("qwen3-32b"), row, few) == ((Bucket("prefill", 1, 1024), Bucket("prefill", 3, 1024)), [])
    batches, limits, published = decode_sizes(Options("qwen3-32b", buckets=(64,)), source, row)
    assert (batches, limits.num_request_slots, published) == ([64], 65, True)
    batches, limits, published = decode_sizes(Options("qwen3-32b", max_model_len=1024), source, row)
    assert (limits.max_model_len, limits.num_pages, published) == (1024, 1 + 32 * 8, False)


def test_prompts_beyond_the_context_are_left_out() -> None:
    where, limits = instance(target_name="ascend-a3", mesh="tp=8"), Limits(128, 65, 9, 1024)
    small, large, shared = PrefillSize(128), PrefillSize(4096), PrefillSize(512, 8)
    buckets = (Bucket("prefill", 1, 128), Bucket("prefill", 8, 512))
    assert prefill_buckets(Options("qwen3-32b", prefill=(shared, small, large)), where, limits) == (buckets, [large])
    with pytest.raises(SpecError, match="no prefill of 4096 tokens fits max_model_len 1024; legal are sizes from 1 to 1024"):
        prefill_buckets(Options("qwen3-32b", prefill=(large,)), where, limits)


def test_a_step_has_no_more_prompts_than_requests_are_in_flight() -> None:
    where, limits = instance(target_name="ascend-a3", mesh="tp=8"), Limits(128, 65, 9, 1024)
    with pytest.raises(SpecError, match="--prefill 9x64 takes 9 prompts a step, and 8 requests are in flight; legal are up to that"):
        prefill_buckets(Options("qwen3-32b", prefill=(PrefillSize(64, 9),)), where, limits)


def test_cached_tokens_are_bounded_in_whole_pages_that_hold_a_request(tiny_checkpoint):
    free = tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64).limits
    assert (free.num_pages - 1) * free.page_size == 4 * 64
    for tokens, pages in ((64, 4), (100, 6), (256, 16), (10_000, 16)):
        plan = tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64, max_total_tokens=tokens)
        assert plan.limits.num_pages - 1 == pages
        assert plan.arguments[plan.arguments.index("--max-total-tokens") + 1] == str(tokens)
    with pytest.raises(SpecError, match=r"--max-total-tokens 63: one request may have 64 tokens; legal is at least that many"):
        tiny.planned(tiny_checkpoint, buckets=(4,), max_model_len=64, max_total_tokens=63)
