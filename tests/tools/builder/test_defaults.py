"""tools/builder/defaults.py: without options a build takes what this machine has memory for, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny

from npucompile.tools.builder import defaults
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.plan import Options, Plan
from npucompile.tools.notation import PrefillSize

PAGE = 16
LONG = 32768
"""Context of the model of these tests, which has states, and three drafts a step."""


@pytest.fixture
def model(tmp_path):
    return str(tiny.write_checkpoint(tmp_path / "long", max_position_embeddings=LONG))


def planned(model: str, **options: object) -> Plan:
    return planning.plan(Options(model, dtype="float32", prefill=(PrefillSize(16),), **options))


def with_memory(monkeypatch, model: str, requests: int, tokens: int) -> None:
    """Gives the machine memory for states of so many requests, with as many kept ones, and for cached tokens."""
    plan = planned(model, buckets=(1,), max_model_len=PAGE)
    room = replace(
        plan, limits=replace(plan.limits, num_pages=1 + tokens // PAGE, num_slots=1 + requests * (4 + 1), checkpoint_slots=0)
    ).state_bytes
    monkeypatch.setattr(defaults, "MACHINE_BYTES", 2 * (plan.params_bytes + room))


def cached(plan: Plan) -> int:
    return (plan.limits.num_pages - 1) * PAGE


def test_a_large_machine_takes_the_whole_context_and_a_part_of_it_for_every_request(monkeypatch, model):
    with_memory(monkeypatch, model, 1000, 1_000_000)
    plan = planned(model)
    assert sorted({b.batch for b in plan.buckets if b.kind == "decode"}) == [1, 4, 16, 64]
    assert plan.limits.num_request_slots - 1 == plan.limits.checkpoint_slots == 64
    assert (plan.limits.max_model_len, cached(plan)) == (LONG, 64 * 4096)
    assert {dict(plan.decided_by)[name] for name in ("buckets", "max-model-len", "max-num-seqs", "max-total-tokens")} == {"plan"}
    notes = "\n".join(plan.notes)
    assert f"context {LONG} tokens, the model's own" in notes
    assert "64 requests in flight, in steps of 1,4,16,64: state may take" in notes
    assert f"{64 * 4096} tokens are cached at once" in notes
    assert planned(model, buckets=(2,)).limits.num_pages == 1 + LONG // PAGE


def test_a_smaller_one_takes_fewer_cached_tokens_then_fewer_requests_then_a_shorter_context(monkeypatch, model):
    with_memory(monkeypatch, model, 64, 100_000)
    plan = planned(model)
    assert (plan.limits.num_request_slots - 1, plan.limits.max_model_len, cached(plan)) == (64, LONG, 100_000)
    with_memory(monkeypatch, model, 16, LONG + 16 * PAGE)
    plan = planned(model)
    assert (plan.buckets[-1].batch, plan.limits.max_model_len, cached(plan)) == (16, LONG, LONG + 16 * PAGE)
    with_memory(monkeypatch, model, 4, 5120)
    plan = planned(model)
    assert (plan.buckets[-1].batch, plan.limits.max_model_len, cached(plan)) == (4, 5120, 5120)
    assert any(note.startswith(f"context 5120 tokens, of {LONG} that the model takes: state may take") for note in plan.notes)
    with_memory(monkeypatch, model, 0, 0)
    plan = planned(model)
    assert (plan.buckets[-1].batch, plan.limits.max_model_len, cached(plan)) == (1, 1024, 1024)


def test_options_decide_what_they_name_and_the_rest_follows(monkeypatch, model):
    with_memory(monkeypatch, model, 64, 100_000)
    assert planned(model, max_model_len=2048).limits == replace(planned(model).limits, max_model_len=2048, num_pages=1 + 100_000 // PAGE)
    few = planned(model, max_num_seqs=6)
    assert sorted({b.batch for b in few.buckets if b.kind == "decode"}) == [1, 4]
    assert (few.limits.num_request_slots - 1, cached(few)) == (6, LONG)
    capped = planned(model, max_total_tokens=8192)
    assert (capped.limits.max_model_len, cached(capped)) == (8192, 8192)
    bounded = planned(model, kv_cache_memory=2**20)
    assert bounded.limits.max_model_len == cached(bounded) < LONG
    both = planned(model, max_num_seqs=3, buckets=(1, 2), max_model_len=LONG)
    assert cached(both) == 3 * LONG


def test_the_arguments_of_a_plan_lead_to_it_on_every_machine(monkeypatch, model):
    for requests, tokens in ((1000, 1_000_000), (16, 50_000), (4, 5120)):
        with_memory(monkeypatch, model, requests, tokens)
        plan = planned(model)
        monkeypatch.setattr(defaults, "MACHINE_BYTES", 2**50)
        again = planning.plan(tiny.options_of(plan.arguments))
        assert replace(again, notes=plan.notes) == plan


def test_attention_that_reads_the_whole_page_table_keeps_a_short_context(model):
    plan = planned(model, kv_cache_dtype="int8")
    assert plan.limits.max_model_len == 1024
    assert any("its attention reads the whole page table at every step" in note for note in plan.notes)
