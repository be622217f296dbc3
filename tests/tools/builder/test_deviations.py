"""tools/builder/deviations.py: what a build changes is said, for each setting that it changes and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.models import registry
from npucompile.tools.builder.deployments import Deployment, deployment, deployments, prefill_chunk
from npucompile.tools.builder.deviations import deviations, source_of
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.builder.rank_memory import planned_memory
from npucompile.tools.notation import PUBLISHED_ENCODE, parse_encode

CASES = {
    ("qwen35-397b-a3x8-in3k5-out1k5-50ms", "mixed"): [],
    ("qwen3-32b-a3x8-mix-18k-4k-12ms", "mixed"): ["in chunks of 3712 tokens, published whole"],
    # As many whole prompts as the published tokens hold, and as many as there are requests.
    ("qwen3-480b-a3x24-pd-3.5k-1.5k-50ms", "prefill"): [],
    ("dsr1-a3x16-pd-2k-2k-50ms", "prefill"): [],
    ("qwen3-next-a3x2-mix-3.5k-1.5k-50ms", "mixed"): ["bfloat16, published float32"],
    ("qwen35-27b-a3x8-mix-lc-256k", "mixed"): ["published float32", "at most 262144 tokens, published 266000", "524288 cached tokens"],
    ("qwen35-27b-mix-tp2-dp1-133k", "mixed"): ["published float32", "8064 tokens, published 8096: a multiple of 128", "cached tokens"],
    ("qwen35-397b-a2x16-mix-mp-2node", "mixed"): ["published float32", "gathered by all ranks, published dispatched"],
}


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_each_change_is_said(name: str, phase: str) -> None:
    row = deployment(name)
    lines = deviations(row, row.phase(phase), source_of(row))
    assert len(lines) == len(CASES[name, phase])
    assert all(part in line for line, part in zip(lines, CASES[name, phase], strict=True)), lines


def test_prompts_that_padding_leaves_no_room_for_are_said() -> None:
    row = replace(deployment("qwen3-480b-a3x24-pd-3.5k-1.5k-50ms"), input_len=600)
    (line,) = deviations(row, row.phase("prefill"), source_of(row))
    assert line == "a prefill step takes 51 prompts of a dp group, each padded to 640 tokens, published 54 in 32768 tokens"


def test_drafts_need_a_draft_model() -> None:
    row = deployment("qwen3-32b-a3x4-mix-4k-1.5k-11ms")
    (line,) = deviations(row, row.phase(), registry.find(row.model))
    assert line == "a step drafts nothing, published 4 tokens: qwen3-32b comes without a draft head"


def test_context_parallelism_is_built_as_published() -> None:
    (row,) = (row for row in deployments().values() if any(phase.context_parallel for phase in row.phases.values()))
    assert (row.id, prefill_chunk(row)) == ("dsv32-a3x32-pd-64k-1k-30ms", 16_000)
    assert deviations(row, row.phase("prefill"), source_of(row)) == ("prompts are prefilled in chunks of 16000 tokens, published whole",)


def test_a_row_with_pictures_that_is_built_without_them_says_so() -> None:
    row = deployment("qwen35-397b-a3x8-in3k5-out1k5-50ms")
    said = f"text alone is taken, published with pictures: --encode {PUBLISHED_ENCODE} takes them"
    assert deviations(row, row.phase(), source_of(row), encodes=False) == (said,)
    assert [f"differs from the deployment: {said}" in plan(options).notes for options in (
        Options(row.model, deployment=row.id), Options(row.model, deployment=row.id, encode=parse_encode(PUBLISHED_ENCODE)),
    )] == [True, False]  # fmt: skip


@pytest.mark.parametrize("row", [row for row in deployments().values() if row.pictures], ids=lambda row: row.id)
def test_rows_with_pictures_fit_with_their_encode_buckets(row: Deployment) -> None:
    planned = plan(Options(row.model, deployment=row.id, encode=parse_encode(PUBLISHED_ENCODE)))
    assert [bucket.name for bucket in planned.buckets[:3]] == ["encode-b1-q256", "encode-b1-q1024", "encode-b1-q4096"]
    planned_memory(planned).check()
